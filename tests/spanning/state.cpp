#include "state.h"

namespace spanning {
namespace {

template <typename Key, typename Value>
const Value* find(const std::map<Key, Value>& map, Key key) {
  const auto found = map.find(key);
  return found == map.end() ? nullptr : &found->second;
}

template <typename Key, typename Value>
std::optional<Value> copy_of(const std::map<Key, Value>& map, Key key) {
  const Value* found = find(map, key);
  return found == nullptr ? std::nullopt : std::optional<Value>(*found);
}

}  // namespace

State& state() {
  static State& state = *new State();  // leaked: clients may outlive static objects
  return state;
}

Group& Client::group(const std::string& ids) {
  std::lock_guard lock(mutex);
  std::unique_ptr<Group>& group = groups[ids];
  if (group == nullptr) group = std::make_unique<Group>();
  return *group;
}

void State::add_client(std::unique_ptr<Client> client) {
  std::lock_guard lock(mutex_);
  PJRT_Client* raw = client->raw;
  clients_[raw] = std::move(client);
}

void State::remove_client(PJRT_Client* raw) {
  std::lock_guard lock(mutex_);
  const auto found = clients_.find(raw);
  if (found == clients_.end()) return;
  const auto is_its = [&](const auto& entry) { return entry.second.client == found->second.get(); };
  std::erase_if(devices_, is_its);
  std::erase_if(descriptions_, is_its);
  std::erase_if(memories_, [&](const auto& entry) { return !devices_.contains(entry.second); });
  clients_.erase(found);
}

Client* State::client(PJRT_Client* raw) {
  std::lock_guard lock(mutex_);
  const auto* found = find(clients_, raw);
  return found == nullptr ? nullptr : found->get();
}

void State::add_device(PJRT_Device* raw, Device device) {
  std::lock_guard lock(mutex_);
  devices_[raw] = device;
}

const Device* State::device(PJRT_Device* raw) {
  std::lock_guard lock(mutex_);
  return find(devices_, raw);
}

void State::add_description(PJRT_DeviceDescription* raw, Device device) {
  std::lock_guard lock(mutex_);
  descriptions_[raw] = device;
}

const Device* State::device(PJRT_DeviceDescription* raw) {
  std::lock_guard lock(mutex_);
  return find(descriptions_, raw);
}

void State::add_memory(PJRT_Memory* raw, PJRT_Device* device) {
  std::lock_guard lock(mutex_);
  memories_[raw] = device;
}

PJRT_Device* State::device_of(PJRT_Memory* raw) {
  std::lock_guard lock(mutex_);
  return copy_of(memories_, raw).value_or(nullptr);
}

void State::add_program(PJRT_LoadedExecutable* raw, std::shared_ptr<const Program> program) {
  std::lock_guard lock(mutex_);
  programs_[raw] = std::move(program);
}

void State::remove_program(PJRT_LoadedExecutable* raw) {
  std::lock_guard lock(mutex_);
  programs_.erase(raw);
}

std::shared_ptr<const Program> State::program(PJRT_LoadedExecutable* raw) {
  std::lock_guard lock(mutex_);
  return copy_of(programs_, raw).value_or(nullptr);
}

}  // namespace spanning
