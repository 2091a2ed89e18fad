#include "graph/program_store.h"

#include <c10/util/hash.h>

#include <cstdlib>
#include <cstring>
#include <fstream>

#include "graph/portable_key.h"
#include "pjrt/client.h"
#include "pjrt/runtime.h"

namespace lazyxla::graph {
namespace {

constexpr size_t kMaxForms = 64;

// What the CPU can do, as Linux tells: code compiled for one may not run on another.
std::string instruction_sets() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("flags") || line.starts_with("Features")) return line;
  }
  return {};
}

std::string environment() {
  pjrt::Runtime& runtime = pjrt::Runtime::get();
  pjrt::Client& client = runtime.client();
  std::string text = runtime.platform() + '\0' + client.platform_version() + '\0' +
                     client.devices()[0].description().kind + '\0' +
                     std::to_string(client.plugin().xla_version().value_or(0)) + '\0';
  if (client.platform_name() == "cpu") text += instruction_sets() + '\0';
  for (const char* flags : {"XLA_FLAGS", "LIBTPU_INIT_ARGS"}) {
    const char* value = std::getenv(flags);
    text += std::string(value ? value : "") + '\0';
  }
  return text;
}

// One line of a graph's entry: the values of the scalars that are no inputs, and the program.
struct Form {
  std::vector<uint32_t> static_slots;
  std::vector<uint64_t> constants;
  std::string program;
};

std::vector<uint64_t> constants(std::vector<bool> variable, c10::ArrayRef<ir::ScalarValue> slots,
                                const std::vector<uint32_t>& static_slots) {
  for (uint32_t slot : static_slots) {
    if (slot < variable.size()) variable[slot] = false;
  }
  std::vector<uint64_t> values;
  for (size_t i = 0; i < slots.size(); ++i) {
    if (!variable[i]) values.push_back(static_cast<uint64_t>(slots[i].i));
  }
  return values;
}

void put(std::string& out, uint64_t word) {
  out.append(reinterpret_cast<const char*>(&word), sizeof word);
}

void put(std::string& out, const Form& form) {
  put(out, form.static_slots.size());
  for (uint32_t slot : form.static_slots) put(out, slot);
  put(out, form.constants.size());
  for (uint64_t value : form.constants) put(out, value);
  put(out, form.program.size());
  out += form.program;
}

// Takes forms off the front of an entry. What ends too early ends the list.
class Reader {
 public:
  explicit Reader(const std::string& bytes) : bytes_(bytes) {}

  std::optional<Form> next() {
    Form form;
    if (at_ == bytes_.size()) return std::nullopt;
    uint64_t count = size();
    for (uint64_t i = 0; i < count; ++i) form.static_slots.push_back(word());
    count = size();
    for (uint64_t i = 0; i < count; ++i) form.constants.push_back(word());
    count = size();
    if (!good_) return std::nullopt;
    form.program = bytes_.substr(at_, count);
    at_ += count;
    return form;
  }

 private:
  uint64_t word() {
    uint64_t value = 0;
    if (bytes_.size() - at_ < sizeof value) {
      good_ = false;
    } else {
      std::memcpy(&value, bytes_.data() + at_, sizeof value);
      at_ += sizeof value;
    }
    return value;
  }

  // How many of something follow: no more than there are bytes.
  uint64_t size() {
    uint64_t value = word();
    if (value > bytes_.size() - at_) good_ = false;
    return good_ ? value : 0;
  }

  const std::string& bytes_;
  size_t at_ = 0;
  bool good_ = true;
};

std::vector<Form> parse(const std::string& bytes) {
  std::vector<Form> forms;
  Reader reader(bytes);
  while (auto form = reader.next()) forms.push_back(std::move(*form));
  return forms;
}

}  // namespace

ProgramStore::Open::Open(Settings told)
    : settings(std::move(told)),
      environment(settings.version + '\0' + lazyxla::graph::environment()),
      cache(settings.directory, settings.max_bytes) {}

ProgramStore& ProgramStore::get() {
  static auto* instance = new ProgramStore();
  return *instance;
}

void ProgramStore::set_provider(std::function<Settings()> provider) {
  std::lock_guard lock(mutex_);
  provider_ = std::move(provider);
  open_ = nullptr;
}

void ProgramStore::forget_settings() {
  std::lock_guard lock(mutex_);
  open_ = nullptr;
}

std::shared_ptr<ProgramStore::Open> ProgramStore::open() {
  std::function<Settings()> provider;
  {
    std::lock_guard lock(mutex_);
    if (open_) return open_;
    provider = provider_;
  }
  // Without the lock: the provider takes the GIL.
  auto opened = std::make_shared<Open>(provider ? provider() : Settings());
  std::lock_guard lock(mutex_);
  if (!open_) open_ = std::move(opened);
  return open_;
}

std::string ProgramStore::graph_name(const Graph& graph, const std::vector<bool>& variable,
                                     const std::string& options) {
  auto store = open();
  if (!store->cache.is_on() || !store->settings.lowering_is_known) return {};
  std::optional<std::string> key = portable_key(graph);
  if (!key) return {};
  put(*key, variable.size());
  for (bool is_variable : variable) key->push_back(is_variable ? '1' : '0');
  put(*key, options.size());
  *key += options + store->environment;
  return "graph-" + c10::sha1(*key).str();
}

std::string ProgramStore::program_name(const std::string& artifact, const std::string& options) {
  auto store = open();
  if (!store->cache.is_on()) return {};
  std::string key;
  put(key, artifact.size());
  key += artifact;
  put(key, options.size());
  key += options + store->environment;
  return "program-" + c10::sha1(key).str();
}

std::optional<ProgramStore::Found> ProgramStore::find_graph(const std::string& name,
                                                            const std::vector<bool>& variable,
                                                            c10::ArrayRef<ir::ScalarValue> slots) {
  if (name.empty()) return std::nullopt;
  auto bytes = open()->cache.read(name);
  if (!bytes) return std::nullopt;
  for (Form& form : parse(*bytes)) {
    if (form.constants != constants(variable, slots, form.static_slots)) continue;
    auto executable = find_program(form.program);
    if (!executable) return std::nullopt;
    return Found{std::move(*executable), std::move(form.static_slots)};
  }
  return std::nullopt;
}

std::optional<std::string> ProgramStore::find_program(const std::string& name) {
  return name.empty() ? std::nullopt : open()->cache.read(name);
}

void ProgramStore::add_graph(const std::string& name, const std::vector<bool>& variable,
                             c10::ArrayRef<ir::ScalarValue> slots,
                             const std::vector<uint32_t>& static_slots,
                             const std::string& program) {
  if (name.empty() || program.empty()) return;
  auto store = open();
  Form form{static_slots, constants(variable, slots, static_slots), program};
  std::string entry;
  put(entry, form);
  size_t count = 1;
  if (auto bytes = store->cache.read(name)) {
    for (const Form& other : parse(*bytes)) {
      bool same = other.static_slots == form.static_slots && other.constants == form.constants;
      if (!same && count++ < kMaxForms) put(entry, other);
    }
  }
  store->cache.write(name, entry);
}

void ProgramStore::add_program(const std::string& name, const std::string& executable) {
  if (!name.empty()) open()->cache.write(name, executable);
}

}  // namespace lazyxla::graph
