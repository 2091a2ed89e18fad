#include <c10/util/flat_hash_map.h>

#include "common/counters.h"
#include "dispatch/generator.h"
#include "ir/sharding.h"
#include "steps/guards.h"
#include "steps/step_program.h"

namespace lazyxla::steps {
namespace {

std::pair<uint64_t, uint64_t> state_of_generator(c10::DeviceIndex device) {
  at::Generator generator = dispatch::default_generator(device);
  std::lock_guard lock(generator.mutex());
  return {generator.current_seed(), generator.get_offset()};
}

}  // namespace

StepRecording::StepRecording(std::vector<at::Tensor> state, std::vector<at::Tensor> numbers,
                             std::vector<at::Tensor> arguments)
    : program_(std::make_shared<StepProgram>()), first_number_(state.size()) {
  StepProgram& program = *program_;
  program.state_ = std::move(state);
  program.state_.insert(program.state_.end(), numbers.begin(), numbers.end());
  if (program.state_.empty()) {
    problem_ = "it has no state on the device";
    return;
  }
  program.device_ = program.state_.front().device().index();
  const auto add = [&](Source::Kind kind, size_t index, const at::Tensor& tensor) {
    if (problem_.empty()) problem_ = add_source(kind, index, tensor);
  };
  for (size_t i = 0; i < program.state_.size(); ++i) add(Source::kState, i, program.state_[i]);
  for (size_t i = 0; i < arguments.size(); ++i) add(Source::kArgument, i, arguments[i]);
  for (size_t i = 0; i < program.state_.size(); ++i) {
    const at::Tensor& gradient = program.state_[i].grad();
    int source = -1;
    if (gradient.defined()) {  // an optimizer uses it even if requires_grad is off
      const char* why = unfit_gradient(gradient);
      if (why && problem_.empty()) problem_ = std::string("a gradient ") + why;
      add(Source::kGradient, i, gradient);
      source = static_cast<int>(program.sources_.size()) - 1;
    }
    program.gradients_.push_back({static_cast<uint32_t>(i), source, -1});
  }
  std::tie(seed_, ordinal_) = state_of_generator(program.device_);
  flushes_ = Counters::get().flushes;
  if (problem_.empty()) program.taped_.start();
}

std::string StepRecording::add_source(Source::Kind kind, size_t index, const at::Tensor& tensor) {
  if (tensor.device() != program_->state_.front().device()) return "it uses several devices";
  ir::Storage& storage = storage_of(tensor);
  const ir::Geometry geometry = geometry_of(tensor);
  std::lock_guard lock(storage.mutex());
  Source source{.kind = kind,
                .index = static_cast<uint32_t>(index),
                .storage = storage.id(),
                .base = storage.base(),
                .view = geometry,
                .sharding = storage.sharding()};
  const ir::Value* copy = kind == Source::kArgument ? storage.find_view(geometry) : nullptr;
  source.copied = copy != nullptr;
  const ir::Value& value = copy ? *copy : storage.value();
  if (!value || storage.is_pending() || !value.node->is_leaf()) return "its state is not computed";
  program_->sources_.push_back(std::move(source));
  tensors_.push_back(tensor);
  before_.push_back(value.node.get());
  return "";
}

std::pair<std::shared_ptr<StepProgram>, std::string> StepRecording::finish(
    const std::vector<at::Tensor>& results) {
  StepProgram& program = *program_;
  program.taped_.stop();
  std::string why = problem_;
  const auto check = [&](auto&& next) {
    if (why.empty()) why = next();
  };
  check([&] { return program.taped_.problem; });
  check([&] {
    const bool one = program.taped_.flushes == 1 && Counters::get().flushes == flushes_ + 1;
    return one ? "" : "it is not one program: a value is read, or an operator runs on the host";
  });
  check([&] {
    const bool drawn =
        state_of_generator(program.device_) == std::pair(seed_, ordinal_ + program.taped_.draws);
    const bool ours =
        !program.taped_.generator ||
        program.taped_.generator == dispatch::default_generator(program.device_).getIntrusivePtr();
    return drawn && ours ? "" : "it uses a random generator in another way than by drawing from it";
  });
  check([&] { return match_leaves(); });
  check([&] { return match_outputs(results); });
  return {why.empty() ? std::move(program_) : nullptr, why};
}

// Finds the source of each input of the program.
std::string StepRecording::match_leaves() {
  StepProgram& program = *program_;
  ska::flat_hash_map<const ir::Node*, size_t> source_of;
  ska::flat_hash_map<const ir::Storage*, size_t> storages;
  for (size_t i = 0; i < before_.size(); ++i) {
    if (!source_of.emplace(before_[i], i).second) return "two of its tensors have the same content";
    if (!storages.emplace(&storage_of(tensors_[i]), i).second) {
      return "two of its tensors share memory";
    }
  }
  for (size_t i = 0; i < program.taped_.leaves.size(); ++i) {
    const auto found = source_of.find(program.taped_.leaves[i]);
    if (found == source_of.end()) {
      return "it uses a tensor that is neither an argument nor reached by its code, or copies one "
             "to the device";
    }
    program.sources_[found->second].leaf = static_cast<int>(i);
  }
  return "";
}

// Finds the target of each output.
std::string StepRecording::match_outputs(const std::vector<at::Tensor>& results) {
  StepProgram& program = *program_;
  const std::vector<graph::Tape::Written>& written = program.taped_.written;
  ska::flat_hash_map<uint64_t, size_t> written_at;
  for (size_t i = 0; i < written.size(); ++i) written_at.emplace(written[i].id, i);
  std::vector<bool> used(written.size(), false);
  for (size_t i = 0; i < program.sources_.size(); ++i) {
    Source& source = program.sources_[i];
    ir::Storage& storage = storage_of(tensors_[i]);
    if (source.kind == Source::kState && storage.id() != source.storage) {
      return "it gives a tensor other memory";
    }
    std::lock_guard lock(storage.mutex());
    if (!(storage.base() == source.base)) return "it lays memory out in another way";
    if (storage.sharding() != source.sharding) return "it spreads a tensor in another way";
    if (const auto found = written_at.find(storage.id()); found != written_at.end()) {
      if (source.copied) return "it writes to a part of an argument's memory";
      if (source.kind == Source::kState && source.index >= first_number_) {
        return "it writes to a learning rate";
      }
      source.output = static_cast<int>(written[found->second].output);
      used[found->second] = true;
      continue;
    }
    const ir::Value* value = source.copied ? storage.find_view(source.view) : &storage.value();
    // The copy of a view is dropped with the region.
    if (value && value->node.get() != before_[i]) return "it gives a tensor the content of another";
  }
  for (const at::Tensor& result : results) {
    if (std::string why = add_fresh(result, used); !why.empty()) return why;
  }
  program.results_ = program.fresh_.size();
  for (StepProgram::Gradient& gradient : program.gradients_) {
    const at::Tensor& now = program.state_[gradient.state].grad();
    if (now.defined() != (gradient.source >= 0)) {
      return "there are gradients before or after it, and not both";
    }
    if (!now.defined()) continue;
    if (const char* why = unfit_gradient(now)) return std::string("a gradient ") + why;
    if (now.is_same(tensors_[gradient.source])) continue;
    gradient.fresh = static_cast<int>(program.fresh_.size());
    if (std::string why = add_fresh(now, used); !why.empty()) return why;
    if (!(program.fresh_.back().geometry == program.sources_[gradient.source].view)) {
      return "a gradient is of another kind than before";
    }
  }
  for (const bool each : used) {
    if (!each) return "a tensor that it makes is kept, and is not returned";
  }
  return "";
}

std::string StepRecording::add_fresh(const at::Tensor& tensor, std::vector<bool>& used) {
  const std::vector<graph::Tape::Written>& written = program_->taped_.written;
  ir::Storage& storage = storage_of(tensor);
  for (size_t i = 0; i < written.size(); ++i) {
    if (written[i].id != storage.id()) continue;
    if (used[i]) return "it returns two tensors that share memory";
    used[i] = true;
    std::lock_guard lock(storage.mutex());
    const ir::Geometry geometry = geometry_of(tensor);
    const bool plain = geometry.dtype == storage.base().dtype && !tensor.is_conj() &&
                       !tensor.is_neg() && !tensor.unsafeGetTensorImpl()->is_python_dispatch();
    if (!plain || static_cast<size_t>(storage.base().nbytes()) != storage.nbytes()) {
      return "it returns another view of what it computes";
    }
    program_->fresh_.push_back({geometry, storage.base(), written[i].sharding, written[i].output,
                                tensor.requires_grad(), tensor.is_inference()});
    return "";
  }
  return "it returns, or has as a gradient, what is not its own result";
}

}  // namespace lazyxla::steps
