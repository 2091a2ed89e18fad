#include "program/stages.h"

#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <utility>

#include "program/workers.h"

namespace lazyxla::program {
namespace {

// Numbers the buffers of a graph that is cut, by its values.
class Buffers {
 public:
  explicit Buffers(const Graph& whole) : next_(whole.leaves.size()) {
    for (uint32_t i = 0; i < next_; ++i) numbers_[i] = i;
    for (uint32_t output : whole.outputs) numbers_[output] = next_++;
    given_ = next_;
  }
  std::vector<uint32_t> of(const std::vector<uint32_t>& values) {
    std::vector<uint32_t> numbers;
    for (uint32_t value : values) {
      const auto [found, is_new] = numbers_.emplace(value, next_);
      if (is_new) ++next_;
      numbers.push_back(found->second);
    }
    return numbers;
  }
  // Some that only stages of one piece hand on.
  uint32_t add(size_t count) { return std::exchange(next_, next_ + count); }
  size_t handed_on() const { return next_ - given_; }

 private:
  ska::flat_hash_map<uint32_t, uint32_t> numbers_;
  uint32_t next_, given_;
};

bool is_same_program(const Piece& a, const Piece& b) {
  return a.graph.hash == b.graph.hash && a.graph.key == b.graph.key;
}

// Which pieces the host may run. A piece that runs once while another runs this often costs little
// even where PyTorch's kernels are slower.
constexpr size_t kManyRounds = 16;

std::vector<OnHost> on_host(const std::vector<Piece>& pieces, const Origin& origin) {
  if (origin.on_host == OnHost::kNone) return std::vector(pieces.size(), OnHost::kNone);
  if (origin.on_host == OnHost::kNewEachTime) {
    return std::vector(pieces.size(), OnHost::kNewEachTime);
  }
  ska::flat_hash_map<uint64_t, size_t> counts;
  size_t most = 0;
  for (const Piece& piece : pieces) most = std::max(most, ++counts[piece.graph.hash]);
  std::vector<OnHost> all;
  for (const Piece& piece : pieces) {
    if (most >= kManyRounds) {
      all.push_back(counts[piece.graph.hash] == 1 ? OnHost::kMedium : OnHost::kFirstRuns);
    } else if (&piece == &largest_of(pieces)) {
      const bool is_tried = origin.on_host == OnHost::kFirstRuns;
      all.push_back(is_tried ? OnHost::kFirstRuns : OnHost::kNone);
    } else {
      all.push_back(OnHost::kStage);
    }
  }
  return all;
}

// Which slots of a piece vary in the whole, or have other values in another piece of the same key.
std::vector<bool> varying_slots(const std::vector<Piece>& pieces, const Piece& piece,
                                const std::vector<bool>& in_whole) {
  std::vector<bool> varying;
  for (uint32_t slot : piece.slots) varying.push_back(slot < in_whole.size() && in_whole[slot]);
  for (const Piece& other : pieces) {
    if (!is_same_program(other, piece)) continue;
    for (size_t i = 0; i < varying.size(); ++i) {
      if (other.graph.slots[i].i != piece.graph.slots[i].i) varying[i] = true;
    }
  }
  return varying;
}

// A piece's program. If it was cut itself, when its graph came alone, it is what its stages are: a
// variant has no stages within stages.
std::vector<StageProgram> stages_of(const VariantRef& variant, const Piece& piece,
                                    Buffers& buffers) {
  std::vector<uint32_t> numbers = buffers.of(piece.inputs);
  const std::vector<uint32_t> outputs = buffers.of(piece.outputs);
  if (variant->stages.empty()) {
    std::vector<int> donatable;
    for (size_t i = 0; i < piece.inputs.size(); ++i) {
      if (piece.graph.aliases[i] >= 0) donatable.push_back(static_cast<int>(i));
    }
    return {{variant, std::move(numbers), outputs, piece.slots, std::move(donatable)}};
  }
  numbers.insert(numbers.end(), outputs.begin(), outputs.end());
  const uint32_t first = buffers.add(variant->handed_on);
  for (size_t i = 0; i < variant->handed_on; ++i) numbers.push_back(first + i);
  std::vector<StageProgram> stages = variant->stages;
  for (StageProgram& stage : stages) {
    for (uint32_t& input : stage.inputs) input = numbers[input];
    for (uint32_t& output : stage.outputs) output = numbers[output];
    for (uint32_t& slot : stage.slots) slot = piece.slots[slot];
  }
  return stages;
}

// Of the inputs that a stage may consume, those leaves of the whole that no later stage takes; and
// none before the largest piece's first stage, so that as much as possible can be undone if that
// one fails.
void limit_donations(std::vector<StageProgram>& stages, size_t first_of_largest, size_t leaves) {
  std::vector<bool> is_used_later(leaves, false);
  for (size_t i = stages.size(); i-- > 0;) {
    const std::vector<uint32_t>& inputs = stages[i].inputs;
    std::erase_if(stages[i].donatable, [&](int input) {
      return i < first_of_largest || inputs[input] >= leaves || is_used_later[inputs[input]];
    });
    for (uint32_t input : inputs) {
      if (input < leaves) is_used_later[input] = true;
    }
  }
}

}  // namespace

const Piece& largest_of(const std::vector<Piece>& pieces) {
  return *std::max_element(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
    return a.graph.nodes.size() < b.graph.nodes.size();
  });
}

std::shared_ptr<Variant> compile_pieces(const Graph& whole, const std::vector<Piece>& pieces,
                                        const Origin& origin, const std::string& reason,
                                        const std::vector<bool>& varying) {
  auto variant = std::make_shared<Variant>();
  variant->line = origin.line;
  variant->scalars.constants = whole.slots;
  variant->scalars.variable.resize(whole.slots.size(), false);
  Buffers buffers(whole);
  std::vector<StageProgram> stages;
  const std::vector<OnHost> which = on_host(pieces, origin);
  size_t first_of_largest = 0;
  for (size_t number = 0; number < pieces.size(); ++number) {
    const Piece& piece = pieces[number];
    const std::string what = "stage " + std::to_string(number + 1) + " of " +
                             std::to_string(pieces.size()) + " of " + reason;
    const Origin stage_origin{.line = origin.line,
                              .admit = nullptr,
                              .on_host = which[number],
                              .part_of = what,
                              .varying = varying_slots(pieces, piece, varying)};
    const auto program = find_program(piece.graph);
    const VariantRef of_piece = program->variant(piece.graph, Compile::kNow, stage_origin);
    of_piece->check_compiled();
    variant->is_trial = variant->is_trial || of_piece->is_trial;
    for (size_t i = 0; i < piece.slots.size(); ++i) {
      if (of_piece->scalars.variable[i]) variant->scalars.variable[piece.slots[i]] = true;
    }
    if (&piece == &largest_of(pieces)) first_of_largest = stages.size();
    for (StageProgram& stage : stages_of(of_piece, piece, buffers)) {
      stages.push_back(std::move(stage));
    }
  }
  limit_donations(stages, first_of_largest, whole.leaves.size());
  variant->take(std::move(stages), buffers.handed_on());
  return variant;
}

Apart::Apart(Graph graph, std::vector<Piece> whole, std::vector<Piece> pieces, Origin origin,
             std::string reason, std::vector<bool> varying)
    : origin_(std::move(origin)),
      reason_(std::move(reason)),
      varying_(std::move(varying)),
      graph_(std::move(graph)),
      whole_{std::move(whole), nullptr},
      pieces_{std::move(pieces), nullptr} {}

VariantRef Apart::find(Form& form, c10::ArrayRef<ir::ScalarValue> slots) {
  const auto made =
      start_on_worker<VariantRef>([self = shared_from_this(), &form, slots = slots.vec()] {
        return self->find_or_make(form, slots);
      });
  return made->get();
}

bool Apart::has_pieces(c10::ArrayRef<ir::ScalarValue> slots) {
  std::unique_lock lock(mutex_, std::try_to_lock);
  return lock && pieces_.last && pieces_.last->matches(slots);
}

VariantRef Apart::find_or_make(Form& form, const std::vector<ir::ScalarValue>& slots) {
  std::lock_guard lock(mutex_);
  if (form.last && form.last->matches(slots)) return form.last;
  graph_.slots = slots;
  for (Piece& piece : form.pieces) {
    for (size_t i = 0; i < piece.slots.size(); ++i) piece.graph.slots[i] = slots[piece.slots[i]];
  }
  form.last = compile_pieces(graph_, form.pieces, origin_, reason_, varying_);
  return form.last;
}

Graph without_data(const Graph& graph) {
  Graph made;
  made.leaves.resize(graph.leaves.size());
  made.outputs = graph.outputs;
  made.slots = graph.slots;
  return made;
}

}  // namespace lazyxla::program
