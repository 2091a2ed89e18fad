#include "distributed/agreement.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <set>
#include <thread>
#include <utility>

#include "common/bytes.h"
#include "common/counters.h"

namespace lazyxla::distributed {
namespace {

using namespace std::chrono_literals;
using program::Launched;

constexpr int64_t kAhead = 63;  // calls that are compared at once
// How long to wait for the others' reports once one has failed. They fail at once, too, for their
// connections are closed.
constexpr auto kGrace = 2s;
constexpr auto kBetweenLooks = 20ms;

// What must be the same in all processes.
std::string identity(const Call& call) {
  return call.number > 0 ? c10::str(call.description, ", number ", call.number) : call.description;
}

// What a process reports to the others.
struct Report {
  std::string identity;  // empty if the process reports nothing
  std::string rest;      // where it was, and the error that it met
  std::vector<std::string> operators;

  Report() = default;
  Report(const Call& call, const std::string& error)
      : identity(distributed::identity(call)),
        rest(c10::str(call.line.empty() ? "" : " at " + call.line,
                      error.empty() ? "" : ":\n    " + error)),
        operators(call.operators) {}

  // Parses the store's form.
  explicit Report(std::string_view bytes) {
    ByteReader reader{bytes};
    const auto text = [&] { return std::string(reader.take_bytes(reader.take_count())); };
    identity = text();
    rest = text();
    while (reader.ok && !reader.left.empty()) operators.push_back(text());
  }
  std::string bytes() const {
    std::string all;
    put_text(all, identity);
    put_text(all, rest);
    for (const std::string& each : operators) put_text(all, each);
    return all;
  }

  bool operator==(const Report&) const = default;
};

constexpr size_t kNowhere = std::numeric_limits<size_t>::max();

// The first operator in which the programs differ, as far as the processes report theirs.
size_t first_difference(const std::vector<Report>& reports) {
  const std::vector<std::string>* first = nullptr;
  size_t same = kNowhere;
  for (const Report& report : reports) {
    if (report.identity.empty()) continue;
    const std::vector<std::string>& operators = report.operators;
    if (!first) first = &operators;
    const auto [mine, theirs] =
        std::mismatch(first->begin(), first->end(), operators.begin(), operators.end());
    if (mine == first->end() && theirs == operators.end()) continue;
    same = std::min<size_t>(same, mine - first->begin());
  }
  return same;
}

std::string operator_at(const Report& report, size_t index) {
  if (report.operators.empty() || index == kNowhere) return "";
  return c10::str(", operator ", index, " of which is ",
                  index < report.operators.size() ? report.operators[index] : "none");
}

std::string listed(const std::vector<int64_t>& ranks) {
  return (ranks.size() == 1 ? "process " : "processes ") + c10::Join(", ", ranks);
}

std::string message(const std::vector<Report>& reports, const std::vector<int64_t>& ranks,
                    const Words& words) {
  std::vector<std::pair<Report, std::vector<int64_t>>> by_report;
  std::set<std::string> identities;
  for (size_t i = 0; i < reports.size(); ++i) {
    auto same = std::find_if(by_report.begin(), by_report.end(),
                             [&](const auto& each) { return each.first == reports[i]; });
    if (same == by_report.end()) same = by_report.insert(same, {reports[i], {}});
    same->second.push_back(ranks[i]);
    if (!reports[i].identity.empty()) identities.insert(reports[i].identity);
  }
  std::string text = identities.size() > 1
                         ? c10::str("lazyxla: processes of a group ", words.differ, ":")
                         : c10::str("lazyxla: ", words.failed, ":");
  const size_t difference = first_difference(reports);
  for (const auto& [report, those] : by_report) {
    text += c10::str("\n  ", listed(those), ": ",
                     report.identity.empty()
                         ? "not there: it ended, is late, or does something else"
                         : report.identity + operator_at(report, difference) + report.rest);
  }
  return text;
}

}  // namespace

int64_t identity_of(const Call& call) {
  return static_cast<int64_t>(c10::hash<std::string>()(identity(call)));
}

Agreement::Agreement(c10::intrusive_ptr<c10d::Backend> channel,
                     c10::intrusive_ptr<c10d::Store> store, std::vector<int64_t> ranks,
                     Comparison comparison, Words words)
    : channel_(std::move(channel)),
      store_(store->clone()),
      ranks_(std::move(ranks)),
      comparison_(comparison),
      words_(words),
      sequence_(comparison) {
  store_->deleteKey(key(channel_->getRank()));  // an earlier group's
}

void Agreement::run(const Call& call, Recorded recorded, c10::function_ref<void()> exchange,
                    bool compare_all) {
  attempt(call, [&] {
    const bool same =
        !is_to_be_compared(call, compare_all) || compare(call, recorded) != Same::kNothing;
    if (same) exchange();
    return same;
  });
}

bool Agreement::is_agreed_on(const Call& call) {
  std::lock_guard lock(mutex_);
  return call.number == last_number_ + 1 && call.number <= agreed_;
}

program::Launched Agreement::agree(const Call& call, Recorded recorded, const Whole& whole) {
  Same same = Same::kCall;
  attempt(call, [&] {
    if (is_to_be_compared(call, /*compare_all=*/true)) {
      same = compare(call, recorded, whole, whole.has_parts ? kIsReady : kHasToMake);
    }
    last_number_ = call.number - 1;  // as `run` compares this call again
    return same != Same::kNothing;
  });
  if (same == Same::kProgram) return Launched::kYes;
  return same == Same::kAllButNumbers ? Launched::kNumbersDiffer : Launched::kNo;
}

void Agreement::agree_anew(const Call& call, Launched found) {
  std::lock_guard lock(mutex_);
  if (found == Launched::kNumbersDiffer || !all_ready_) {
    agreed_ = std::min(agreed_, call.number - 1);
  }
}

void Agreement::give_up(const Call& call, const std::string& error) {
  std::lock_guard lock(mutex_);
  if (!broken_.empty() || call.number <= agreed_) return;
  try {
    // Before the others come to know that there is something to read: what it may replace is what
    // this process was in when another group failed.
    store_->set(key(channel_->getRank()), Report(call, error).bytes());
    if (compare(
            call, [](int64_t) { return std::vector<int64_t>(); }, {}, kGaveUp) !=
        Same::kAllGaveUp) {
      fail(call, error);
    }
  } catch (const std::exception&) {  // what was to be made throws the error itself
    if (broken_.empty()) broken_ = error;
  }
}

void Agreement::launch_whole(const Call& call, const Whole& whole,
                             c10::function_ref<void()> launch) {
  attempt(call, [&] {
    last_number_ = call.number + whole.calls - 1;
    launch();
    return true;
  });
}

void Agreement::attempt(const Call& call, c10::function_ref<bool()> action) {
  std::lock_guard lock(mutex_);
  TORCH_CHECK(broken_.empty(), broken_);
  std::string error;
  try {
    if (action()) return;
  } catch (const c10::Error& caught) {
    error = caught.what_without_backtrace();
  } catch (const std::exception& caught) {
    error = caught.what();
  }
  fail(call, error);
}

bool Agreement::is_to_be_compared(const Call& call, bool compare_all) {
  if (call.number == 0 || comparison_ == Comparison::kNever) return false;
  // If calls were skipped, since their program failed, other processes may wait in them.
  const bool follows = call.number == std::exchange(last_number_, call.number) + 1;
  const bool is_next = sequence_.is_next_compared(c10::hash<std::string>()(call.description));
  return !follows || ((is_next || compare_all) && call.number > agreed_);
}

Agreement::Same Agreement::compare(const Call& call, Recorded recorded) {
  Same same = Same::kNothing;
  do {
    same = compare(call, recorded, {}, kIsReady);
  } while (same != Same::kNothing && !all_ready_);
  return same;
}

Agreement::Same Agreement::compare(const Call& call, Recorded recorded, const Whole& whole,
                                   Readiness ready) {
  const auto options = at::TensorOptions().dtype(at::kLong);
  const int64_t size = channel_->getSize();
  // Zeros follow the identities: calls that are not recorded yet are not agreed on. Then the
  // program, and how ready the process is.
  const int64_t words = kAhead + 3;
  at::Tensor own = at::zeros({words}, options), all = at::empty({size * words}, options);
  const std::vector<int64_t> identities = recorded(call.number);
  const auto count = std::min<int64_t>(identities.size(), kAhead);
  std::copy_n(identities.begin(), count, own.data_ptr<int64_t>());
  own.data_ptr<int64_t>()[kAhead] = static_cast<int64_t>(whole.hash);
  own.data_ptr<int64_t>()[kAhead + 1] = static_cast<int64_t>(whole.without_numbers);
  own.data_ptr<int64_t>()[kAhead + 2] = ready;
  ++Counters::get().comparisons;
  channel_->_allgather_base(all, own)->wait();
  const auto of_process = all.view({size, words});
  const auto rows = of_process.accessor<int64_t, 2>();
  int64_t same = 0;
  const auto agree = [&](int64_t i) {
    for (int64_t member = 0; member < size; ++member) {
      if (rows[member][i] != rows[0][i] || rows[member][i] == 0) return false;
    }
    return true;
  };
  int64_t gave_up = 0;
  all_ready_ = true;
  for (int64_t member = 0; member < size; ++member) {
    if (rows[member][kAhead + 2] == kGaveUp) ++gave_up;
    if (rows[member][kAhead + 2] != kIsReady) all_ready_ = false;
  }
  if (gave_up > 0) return gave_up == size ? Same::kAllGaveUp : Same::kNothing;
  while (same < kAhead && agree(same)) ++same;
  const bool is_same_program = same > 0 && agree(kAhead);
  agreed_ = call.number + (is_same_program ? whole.calls : same) - 1;
  if (same == 0) return Same::kNothing;
  if (is_same_program) return Same::kProgram;
  if (!agree(kAhead + 1)) return Same::kCall;
  agreed_ = call.number - 1;  // the program that takes the numbers as inputs is compared as well
  return Same::kAllButNumbers;
}

void Agreement::fail(const Call& call, const std::string& error) {
  std::vector<Report> reports;
  for (const std::string& bytes : exchange_reports(Report(call, error).bytes())) {
    reports.push_back(bytes.empty() ? Report() : Report(bytes));
  }
  broken_ = message(reports, ranks_, words_);
  TORCH_CHECK(false, broken_);
}

std::vector<std::string> Agreement::exchange_reports(const std::string& own) {
  const auto own_rank = static_cast<size_t>(channel_->getRank());
  std::vector<std::string> reports(ranks_.size());
  reports[own_rank] = own;
  try {
    store_->set(key(own_rank), own);
    const auto end = std::chrono::steady_clock::now() + kGrace;
    for (size_t member = 0; member < reports.size();) {
      if (member == own_rank || store_->check({key(member)})) {
        if (member != own_rank) reports[member] = store_->get_to_str(key(member));
        ++member;
      } else if (std::chrono::steady_clock::now() < end) {
        std::this_thread::sleep_for(kBetweenLooks);
      } else {
        ++member;
      }
    }
  } catch (const std::exception&) {  // the process that holds the store is gone
  }
  return reports;
}

std::string Agreement::key(size_t member) const {
  return "lazyxla/failed/" + std::to_string(ranks_.at(member));
}

}  // namespace lazyxla::distributed
