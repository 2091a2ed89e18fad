#include "distributed/messages.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <thread>

#include "common/locks.h"

namespace lazyxla::distributed {
namespace {

constexpr int64_t kHeader = 256;  // bytes: what it is, and the user's line as far as it fits

// "3 of float32"
std::string what(const at::Tensor& data) {
  return c10::str(data.numel(), " of ", c10::getDtypeNames(data.scalar_type()).first);
}

size_t hash_of(const at::Tensor& data) { return c10::hash<std::string>()(what(data)); }

// Under which tag it is transferred.
int transferred_tag(int64_t tag, const at::Tensor& data) {
  return static_cast<int>(c10::hash_combine(static_cast<size_t>(tag), hash_of(data)) & 0x7fffffff);
}

at::Tensor header_of(const at::Tensor& data, const std::string& line) {
  at::Tensor header = at::zeros({kHeader}, at::kByte);
  const std::string text = what(data) + "\n" + (line.empty() ? "" : " at " + line);
  std::memcpy(header.data_ptr(), text.data(), std::min<size_t>(text.size(), kHeader - 1));
  return header;
}

}  // namespace

// Sends under way. Gloo notices that a transfer is over only when it is waited for.
class Messages::Sends : public std::enable_shared_from_this<Messages::Sends> {
 public:
  void add(Transfer transfer) {
    const auto all = all_.hold();
    if (!all->started) std::thread([self = shared_from_this()] { self->work(); }).detach();
    all->started = true;  // unless there can be no more threads
    all->transfers.push_back(std::move(transfer));
    changed_.notify_all();
  }

  void finish() {
    std::exception_ptr error;
    {
      const auto all = all_.hold();
      all.wait(changed_, [&] { return all->transfers.empty() && !all->busy; });
      std::swap(error, all->error);
    }
    if (error) std::rethrow_exception(error);
  }

  // The result is no longer needed.
  void stop() {
    all_.hold()->stopped = true;
    changed_.notify_all();
  }

 private:
  void work() {
    for (Transfer transfer; await_first(transfer);) {
      std::exception_ptr error;
      try {
        transfer.work->wait();
      } catch (...) {
        error = std::current_exception();
      }
      transfer = {};
      const auto all = all_.hold();
      if (!all->error) all->error = error;
      all->busy = false;
      changed_.notify_all();
    }
  }

  // False if there is nothing more to do.
  bool await_first(Transfer& transfer) {
    const auto all = all_.hold();
    all.wait(changed_, [&] { return all->stopped || !all->transfers.empty(); });
    if (all->stopped) return false;
    transfer = std::move(all->transfers.front());
    all->transfers.pop_front();
    return all->busy = true;
  }

  struct All {
    std::deque<Transfer> transfers;
    std::exception_ptr error;  // the first one
    bool busy = false;
    bool started = false;
    bool stopped = false;
  };
  Guarded<All> all_;
  std::condition_variable changed_;
};

Messages::Messages(c10::intrusive_ptr<c10d::Backend> transport,
                   c10::intrusive_ptr<c10d::Backend> channel, std::vector<int64_t> ranks,
                   Comparison comparison)
    : transport_(std::move(transport)),
      channel_(std::move(channel)),
      ranks_(std::move(ranks)),
      comparison_(comparison),
      sends_(std::make_shared<Sends>()) {}

Messages::~Messages() { sends_->stop(); }

void Messages::send(at::Tensor data, int64_t peer, int64_t tag, const std::string& line) {
  const auto to = static_cast<int>(peer);
  if (sequence(sent_, {peer, tag}).is_next_compared(hash_of(data))) {
    std::vector<at::Tensor> header{header_of(data, line)};
    sends_->add({channel_->send(header, to, static_cast<int>(tag)), header[0]});
  }
  if (data.numel() == 0) return;
  std::vector<at::Tensor> message{std::move(data)};
  sends_->add({transport_->send(message, to, transferred_tag(tag, message[0])), message[0]});
}

void Messages::start_receive(const at::Tensor& like, int64_t peer, int64_t tag) {
  const auto from = static_cast<int>(peer);
  Started started;
  std::vector<at::Tensor> message{at::empty({like.numel()}, like.options())};
  if (sequence(received_, {peer, tag}).is_next_compared(hash_of(message[0]))) {
    std::vector<at::Tensor> header{at::empty({kHeader}, at::kByte)};
    started.header = {channel_->recv(header, from, static_cast<int>(tag)), header[0]};
  }
  if (like.numel() > 0) {
    started.message.work = transport_->recv(message, from, transferred_tag(tag, message[0]));
  }
  started.message.data = std::move(message[0]);
  started_[{peer, tag}].push_back(std::move(started));
}

at::Tensor Messages::finish_receive(int64_t peer, int64_t tag) {
  auto& queue = started_[{peer, tag}];
  TORCH_CHECK(!queue.empty(), "lazyxla: nothing was to be received from process ", peer);
  const Started started = std::move(queue.front());
  queue.pop_front();
  if (started.header.work) {
    started.header.work->wait();
    std::string text = static_cast<const char*>(started.header.data.const_data_ptr());
    const size_t end = text.find('\n');
    const bool same = text.substr(0, end) == what(started.message.data);
    TORCH_CHECK(same, "process ", ranks_.at(peer), " sent ", text.erase(end, 1));
  }
  if (started.message.work) started.message.work->wait();
  return started.message.data;
}

void Messages::finish_sends() { sends_->finish(); }

}  // namespace lazyxla::distributed
