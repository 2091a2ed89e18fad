#include <c10/util/flat_hash_map.h>

#include "common/bytes.h"
#include "program/graph.h"
#include "program/replicas.h"

namespace lazyxla::program {
namespace {

using ir::Arg;

// Appends values to a run of bytes so that different values never give the same bytes: every list
// and string is preceded by its length, every variant by its tag.
class Writer {
 public:
  // Names of groups are the processes' own.
  explicit Writer(const Replicas* replicas) : replicas_(replicas) {}

  // False if something could not be written out.
  bool good() const { return good_; }
  std::string take() { return std::move(bytes_); }

  void word(uint64_t value) { put(bytes_, value); }
  void text(const std::string& value) { put_text(bytes_, value); }

  void integers(c10::IntArrayRef values) {
    word(values.size());
    for (int64_t value : values) word(static_cast<uint64_t>(value));
  }

  void real(double value) { put(bytes_, value); }

  void constant(const c10::IValue& value) {
    if (value.isNone()) {
      word(0);
    } else if (value.isBool()) {
      word(1), word(value.toBool());
    } else if (value.isInt()) {
      word(2), word(static_cast<uint64_t>(value.toInt()));
    } else if (value.isUnsigned()) {  // beyond int64
      word(9), word(value.toUInt());
    } else if (value.isDouble()) {
      word(3), real(value.toDouble());
    } else if (value.isComplexDouble()) {
      word(4), real(value.toComplexDouble().real()), real(value.toComplexDouble().imag());
    } else if (value.isString()) {
      const auto group = replicas_ ? replicas_->describe(value.toStringRef()) : std::nullopt;
      word(group ? 8 : 5), text(group.value_or(value.toStringRef()));
    } else if (value.isList()) {
      word(6), word(value.toListRef().size());
      for (const c10::IValue& element : value.toListRef()) constant(element);
    } else if (value.isDevice()) {
      word(7), word(static_cast<uint64_t>(value.toDevice().type()));
      word(static_cast<uint64_t>(value.toDevice().index()));
    } else {
      good_ = false;
    }
  }

  void type(const ir::TensorType& type) {
    word(static_cast<uint64_t>(type.dtype));
    integers(type.dims);
  }

  void argument(const Arg& arg) {
    word(static_cast<uint64_t>(arg.kind));
    constant(arg.constant);
    word(static_cast<uint64_t>(arg.dtype));
    word(arg.wrapped);
    word(arg.list.size());
    for (const Arg& element : arg.list) argument(element);
    if (arg.kind != Arg::Kind::kGeometry) return;
    word(static_cast<uint64_t>(arg.geometry.dtype));
    integers(arg.geometry.sizes);
    integers(arg.geometry.strides);
    word(static_cast<uint64_t>(arg.geometry.offset));
  }

  void spec(const ir::OpSpec& spec) {
    good_ = good_ && (spec.portable || !spec.content.empty());
    text(spec.name);
    text(spec.content);
    word(spec.portable ? spec.args.size() : 0);
    for (const Arg& arg : spec.args) {
      if (spec.portable) argument(arg);
    }
    word(spec.slots.size());
    for (const ir::SlotSpec& slot : spec.slots) {
      word(static_cast<uint64_t>(slot.dtype));
      word(slot.wrapped);
      word(static_cast<uint64_t>(slot.kind));
      word(slot.narrow);
    }
    word(spec.outputs.size());
    for (const ir::TensorType& output : spec.outputs) type(output);
    word(spec.random);
    word(spec.settings);
  }

 private:
  const Replicas* replicas_;
  std::string bytes_;
  bool good_ = true;
};

}  // namespace

std::optional<std::string> portable_key(const Graph& graph) {
  Writer writer(graph.replicas.get());
  std::vector<uint64_t> key = graph.key;
  key[0] = 0;  // options of the compiler are passed separately
  ska::flat_hash_map<const ir::OpSpec*, uint64_t> indices;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const ir::OpSpec* spec = graph.nodes[i]->spec();
    auto [index, is_new] = indices.emplace(spec, indices.size());
    if (is_new) writer.spec(*spec);
    if (!writer.good()) return std::nullopt;
    key[graph.records[i] - 1] = index->second;
  }
  if (graph.partition) {  // its words are this process's own
    key.resize(key.size() - graph.partition->words());
    writer.text(graph.partition->text());
  }
  writer.word(key.size());
  for (uint64_t word : key) writer.word(word);
  return writer.take();
}

}  // namespace lazyxla::program
