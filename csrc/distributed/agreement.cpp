#include "distributed/agreement.h"

#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <thread>
#include <utility>

namespace lazyxla::distributed {
namespace {

using namespace std::chrono_literals;

constexpr int kFirst = 2;        // times that a pair of calls is compared
constexpr size_t kPairs = 4096;  // that are remembered; what comes then is not compared
// How long to wait for what the others tell once one has failed. They fail at once, too, for their
// connections are closed.
constexpr auto kGrace = 2s;
constexpr auto kBetweenLooks = 20ms;

// What must be the same in all processes.
std::string identity(const Call& call) {
  return call.number > 0 ? c10::str(call.description, ", number ", call.number) : call.description;
}

// What a process tells the others: the identity, and behind a line's end the rest.
std::string report(const Call& call, const std::string& error) {
  return c10::str(identity(call), "\n", call.line.empty() ? "" : " at " + call.line,
                  error.empty() ? "" : ":\n    " + error);
}

std::string identity_of(const std::string& report) { return report.substr(0, report.find('\n')); }

std::string readable(std::string report) {
  report.erase(report.find('\n'), 1);
  return report;
}

std::string listed(const std::vector<int64_t>& ranks) {
  return (ranks.size() == 1 ? "process " : "processes ") + c10::Join(", ", ranks);
}

std::string message(const std::vector<std::string>& reports, const std::vector<int64_t>& ranks) {
  std::vector<std::pair<std::string, std::vector<int64_t>>> by_report;
  std::set<std::string> identities;
  for (size_t i = 0; i < reports.size(); ++i) {
    auto same = std::find_if(by_report.begin(), by_report.end(),
                             [&](const auto& each) { return each.first == reports[i]; });
    if (same == by_report.end()) same = by_report.insert(same, {reports[i], {}});
    same->second.push_back(ranks[i]);
    if (!reports[i].empty()) identities.insert(identity_of(reports[i]));
  }
  std::string text = identities.size() > 1
                         ? "lazyxla: processes of a group call different collectives:"
                         : "lazyxla: a collective failed:";
  for (const auto& [report, those] : by_report) {
    text += c10::str(
        "\n  ", listed(those), ": ",
        report.empty() ? "not there: it ended, is late, or does something else" : readable(report));
  }
  return text;
}

}  // namespace

Comparison comparison_named(const std::string& name) {
  if (name == "always") return Comparison::kAlways;
  return name == "never" ? Comparison::kNever : Comparison::kFirst;
}

Agreement::Agreement(c10::intrusive_ptr<c10d::Backend> transport,
                     c10::intrusive_ptr<c10d::Store> store, std::vector<int64_t> ranks,
                     Comparison comparison)
    : transport_(std::move(transport)),
      store_(std::move(store)),
      ranks_(std::move(ranks)),
      comparison_(comparison) {
  store_->deleteKey(key(transport_->getRank()));  // an earlier group's
}

void Agreement::run(const Call& call, c10::function_ref<void()> exchange) {
  std::lock_guard lock(mutex_);
  TORCH_CHECK(broken_.empty(), broken_);
  std::string error;
  try {
    if (!is_to_be_compared(call) || compare(call)) {
      exchange();
      return;
    }
  } catch (const c10::Error& caught) {
    error = caught.what_without_backtrace();
  } catch (const std::exception& caught) {
    error = caught.what();
  }
  fail(call, error);
}

bool Agreement::is_to_be_compared(const Call& call) {
  if (call.number == 0 || comparison_ == Comparison::kNever) return false;
  const size_t pair = c10::hash_combine(last_, c10::hash<std::string>()(call.description));
  last_ = c10::hash<std::string>()(call.description);
  // If some were not run, for their program failed, others may wait in them.
  const bool follows = call.number == std::exchange(last_number_, call.number) + 1;
  if (comparison_ == Comparison::kAlways || !follows) return true;
  if (compared_.size() == kPairs && !compared_.count(pair)) return false;
  return compared_[pair]++ < kFirst;
}

bool Agreement::compare(const Call& call) {
  const auto options = at::TensorOptions().dtype(at::kLong);
  at::Tensor own = at::empty({1}, options), all = at::empty({transport_->getSize()}, options);
  own.data_ptr<int64_t>()[0] = static_cast<int64_t>(c10::hash<std::string>()(identity(call)));
  transport_->_allgather_base(all, own)->wait();
  return all.eq(own).all().item<bool>();
}

void Agreement::fail(const Call& call, const std::string& error) {
  broken_ = message(exchange_reports(report(call, error)), ranks_);
  TORCH_CHECK(false, broken_);
}

std::vector<std::string> Agreement::exchange_reports(const std::string& own) {
  const auto own_rank = static_cast<size_t>(transport_->getRank());
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
