#include "program/program_store.h"

#include <algorithm>
#include <filesystem>

#include "common/bytes.h"
#include "common/cache_files.h"
#include "pjrt/client.h"
#include "pjrt/runtime.h"
#include "program/portable_key.h"

namespace lazyxla::graph {
namespace {

constexpr size_t kMaxForms = 64;
constexpr size_t kMaxEnvironments = 16;  // that a miss is explained by

// One line of a graph's entry. A program that has other inputs, constants or static scalars is
// another form.
struct Form {
  std::vector<bool> variable;
  std::vector<uint32_t> static_slots;
  std::vector<uint64_t> constants;  // of the scalars that are no inputs
  std::string program;
  bool is_like(const Form& other) const {
    return variable == other.variable && static_slots == other.static_slots &&
           constants == other.constants;
  }
};

std::vector<uint64_t> constants(const std::vector<bool>& variable,
                                c10::ArrayRef<ir::ScalarValue> slots) {
  std::vector<uint64_t> values;
  for (size_t i = 0; i < slots.size(); ++i) {
    if (!variable[i]) values.push_back(static_cast<uint64_t>(slots[i].i));
  }
  return values;
}

void put_form(std::string& out, const Form& form) {
  put<uint64_t>(out, form.variable.size());
  for (bool is_variable : form.variable) out.push_back(is_variable ? 1 : 0);
  put<uint64_t>(out, form.static_slots.size());
  for (uint32_t slot : form.static_slots) put<uint64_t>(out, slot);
  put<uint64_t>(out, form.constants.size());
  for (uint64_t value : form.constants) put(out, value);
  put_text(out, form.program);
}

Form take_form(ByteReader& in) {
  Form form;
  for (uint64_t n = in.take_count(); in.ok && n > 0; --n) {
    form.variable.push_back(in.take<uint8_t>() != 0);
  }
  for (uint64_t n = in.take_count(); in.ok && n > 0; --n) {
    form.static_slots.push_back(in.take<uint64_t>());
  }
  for (uint64_t n = in.take_count(); in.ok && n > 0; --n) {
    form.constants.push_back(in.take<uint64_t>());
  }
  form.program = in.take_bytes(in.take_count());
  return form;
}

// What ends too early ends the list.
std::vector<Form> parse(const std::string& bytes) {
  std::vector<Form> forms;
  for (ByteReader in{bytes}; !in.left.empty();) {
    Form form = take_form(in);
    if (!in.ok) break;
    forms.push_back(std::move(form));
  }
  return forms;
}

// Whether it can be run with these scalars, the `needed` ones as inputs if they can be.
bool serves(const Form& form, const std::vector<bool>& needed,
            c10::ArrayRef<ir::ScalarValue> slots) {
  if (form.variable.size() != slots.size()) return false;
  std::vector<bool> missing = needed;
  for (uint32_t slot : form.static_slots) {
    if (slot >= missing.size()) return false;
    missing[slot] = false;
  }
  for (size_t i = 0; i < slots.size(); ++i) {
    if (missing[i] && !form.variable[i]) return false;
  }
  return form.constants == constants(form.variable, slots);
}

std::vector<bool> without(std::vector<bool> variable, const std::vector<uint32_t>& static_slots) {
  for (uint32_t slot : static_slots) {
    if (slot < variable.size()) variable[slot] = false;
  }
  return variable;
}

size_t count(const std::vector<bool>& variable) {
  return static_cast<size_t>(std::count(variable.begin(), variable.end(), true));
}

struct Current {
  std::mutex mutex;
  std::function<ProgramStore::Settings()> provider;
  std::shared_ptr<ProgramStore> store;

  static Current& get() {
    static auto* instance = new Current();
    return *instance;
  }
};

// The directory of the programs, made if need be; empty if it cannot be used, or nothing is kept.
std::string usable_directory(const ProgramStore::Settings& settings) {
  if (settings.directory.empty() || settings.max_bytes <= 0) return {};
  const std::string cache = std::filesystem::path(settings.directory).parent_path().string();
  for (const std::string& path : {cache, settings.directory}) {
    const auto refused = prepare_directory_or_warn(path);
    if (!refused) continue;
    if (!refused->by_others) warn_not_kept(path, refused->reason);
    return {};
  }
  return settings.directory;
}

constexpr char kEnvironment[] = "environment";

// The text of a program, or of a graph, before what it is compiled for.
std::string key_text(const std::string& text, const std::string& options,
                     const std::string& environment) {
  std::string all;
  all.reserve(text.size() + options.size() + environment.size() + 2 * sizeof(uint64_t));
  put_text(all, text);
  put_text(all, options);
  all += environment;
  return all;
}

EntryKey graph_key_in(const std::string& environment, const std::string& key,
                      const std::string& options) {
  return {"graph", key_text(key, options, environment)};
}

}  // namespace

ProgramStore::ProgramStore(Settings settings, std::string environment)
    : settings_(std::move(settings)),
      environment_(std::move(environment)),
      cache_(usable_directory(settings_), settings_.max_bytes) {}

std::shared_ptr<ProgramStore> ProgramStore::current() {
  Current& current = Current::get();
  std::function<Settings()> provider;
  {
    std::lock_guard lock(current.mutex);
    if (current.store) return current.store;
    provider = current.provider;
  }
  // Without the lock: the provider takes the GIL.
  Settings settings = provider ? provider() : Settings();
  pjrt::Runtime& runtime = pjrt::Runtime::get();
  std::string text =
      environment(runtime.platform(), *pjrt::Topology::of(runtime.client()), settings.version);
  auto store = std::make_shared<ProgramStore>(std::move(settings), std::move(text));
  std::lock_guard lock(current.mutex);
  if (!current.store) current.store = std::move(store);
  return current.store;
}

void ProgramStore::set_provider(std::function<Settings()> provider) {
  Current& current = Current::get();
  std::lock_guard lock(current.mutex);
  current.provider = std::move(provider);
  current.store = nullptr;
}

void ProgramStore::forget_settings() {
  Current& current = Current::get();
  std::lock_guard lock(current.mutex);
  current.store = nullptr;
}

EntryKey ProgramStore::graph_key(const Graph& graph, const std::string& options) const {
  if (!cache_.is_on() || !settings_.lowering_is_known) return {};
  return graph_key(portable_key(graph), options);
}

EntryKey ProgramStore::graph_key(const std::optional<std::string>& key,
                                 const std::string& options) const {
  if (!key || !cache_.is_on() || !settings_.lowering_is_known) return {};
  return graph_key_in(environment_, *key, options);
}

EntryKey ProgramStore::program_key(const std::string& artifact, const std::string& options) const {
  if (!cache_.is_on()) return {};
  return {"program", key_text(artifact, options, environment_)};
}

std::optional<ProgramStore::Found> ProgramStore::find_graph(const EntryKey& key,
                                                            const std::vector<bool>& wanted,
                                                            const std::vector<bool>& needed,
                                                            c10::ArrayRef<ir::ScalarValue> slots) {
  auto bytes = cache_.read(key);
  if (!bytes) return std::nullopt;
  std::optional<Form> best;
  for (Form& form : parse(*bytes)) {
    if (!serves(form, needed, slots)) continue;
    const bool is_exact = form.variable == without(wanted, form.static_slots);
    if (is_exact || !best || count(form.variable) > count(best->variable)) best = std::move(form);
    if (is_exact) break;
  }
  if (!best) return std::nullopt;
  auto executable = cache_.read_named(best->program);
  if (!executable) return std::nullopt;
  return Found{std::move(*executable), std::move(best->variable), std::move(best->static_slots)};
}

std::optional<std::string> ProgramStore::find_program(const EntryKey& key) {
  return cache_.read(key);
}

bool ProgramStore::add_graph(const EntryKey& key, const std::vector<bool>& wanted,
                             c10::ArrayRef<ir::ScalarValue> slots,
                             const std::vector<uint32_t>& static_slots,
                             const std::string& program) {
  if (key.is_empty() || program.empty()) return false;
  add_environment();
  Form form{without(wanted, static_slots), static_slots, {}, program};
  form.constants = constants(form.variable, slots);
  std::string entry;
  put_form(entry, form);
  size_t count = 1;
  if (auto bytes = cache_.read(key)) {
    for (const Form& other : parse(*bytes)) {
      if (!form.is_like(other) && count++ < kMaxForms) put_form(entry, other);
    }
  }
  return cache_.write(key, entry);
}

bool ProgramStore::add_program(const EntryKey& key, const std::string& executable) {
  if (key.is_empty()) return false;
  add_environment();
  return cache_.write(key, executable);
}

void ProgramStore::add_environment() {
  std::call_once(environment_added_, [&] {
    const EntryKey key(kEnvironment, environment_);
    if (!cache_.read(key)) cache_.write(key, "");
  });
}

const std::vector<std::string>& ProgramStore::other_environments() {
  std::call_once(environments_read_, [&] {
    nothing_is_ours_ = true;
    for (EntryKey& key : cache_.keys(kEnvironment)) {
      if (key.text == environment_) {
        nothing_is_ours_ = false;
      } else if (other_environments_.size() < kMaxEnvironments) {
        other_environments_.push_back(std::move(key.text));
      }
    }
    std::sort(other_environments_.begin(), other_environments_.end(),
              [&](const std::string& a, const std::string& b) {
                return count_differences(a, environment_) < count_differences(b, environment_);
              });
  });
  return other_environments_;
}

std::string ProgramStore::explain(const std::string& whose, const std::string& other) const {
  return "; " + whose + " in " + cache_.directory() +
         " for another environment: " + differences(other, environment_);
}

bool ProgramStore::has_programs(const EntryKey& graph) {
  const auto bytes = cache_.read(graph);
  const std::vector<Form> forms = parse(bytes.value_or(""));
  return std::any_of(forms.begin(), forms.end(),
                     [&](const Form& form) { return cache_.contains(form.program); });
}

std::string ProgramStore::explain_miss(const Graph& graph, const std::string& options) {
  if (!cache_.is_on()) return {};
  const auto& others = other_environments();
  const bool nothing_is_ours = nothing_is_ours_.exchange(false);
  std::optional<std::string> key;
  if (settings_.lowering_is_known) key = portable_key(graph);
  if (key && has_programs(graph_key_in(environment_, *key, options))) {
    return "; it is kept in " + cache_.directory() + " for other numbers";
  }
  if (others.empty()) return {};
  for (const std::string& other : others) {
    if (key && cache_.contains(graph_key_in(other, *key, options).name)) {
      return explain("it is kept", other);
    }
  }
  return nothing_is_ours ? explain("all programs are", others.front()) : "";
}

}  // namespace lazyxla::graph
