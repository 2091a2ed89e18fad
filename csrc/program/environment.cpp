#include "program/environment.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

namespace lazyxla::graph {
namespace {

// Of a value that is longer only the words that differ are told.
constexpr size_t kShort = 100;
constexpr size_t kMaxWords = 6;

// What the CPU can do, as Linux tells: code compiled for one may not run on another.
std::string instruction_sets() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("flags") || line.starts_with("Features")) {
      return line.substr(line.find(':') + 1);
    }
  }
  return {};
}

// The library itself. Some plugins tell no version: another build is most likely of another size.
std::string library(const pjrt::Plugin& plugin) {
  const auto [major, minor] = plugin.api_version();
  std::ostringstream text;
  text << "PJRT " << major << "." << minor << ", XLA " << plugin.xla_version().value_or(0);
  if (const auto version = plugin.stablehlo_current_version()) {
    text << ", StableHLO " << (*version)[0] << "." << (*version)[1] << "." << (*version)[2];
  }
  std::error_code error;
  const auto bytes = std::filesystem::file_size(plugin.path(), error);
  if (!error) text << ", " << bytes << " bytes";
  return text.str();
}

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

std::string in_text(const CompileOptions& options) {
  std::ostringstream text;
  text << std::boolalpha;
  for (const auto& [name, value] : options) {
    text << name << "=";
    std::visit([&](const auto& given) { text << given << " "; }, value);
  }
  return text.str();
}

std::vector<std::string> words(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> all;
  for (std::string word; stream >> word;) all.push_back(std::move(word));
  return all;
}

// Any white space becomes one space: a field is a line.
std::string on_one_line(const std::string& text) {
  std::string line;
  for (const std::string& word : words(text)) line += (line.empty() ? "" : " ") + word;
  return line;
}

Fields parse(const std::string& text) {
  Fields fields;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t colon = line.find(": ");
    if (colon == std::string::npos) continue;
    fields.emplace_back(line.substr(0, colon), line.substr(colon + 2));
  }
  return fields;
}

const std::string* find(const Fields& fields, const std::string& name) {
  const auto found = std::find_if(fields.begin(), fields.end(),
                                  [&](const auto& field) { return field.first == name; });
  return found == fields.end() ? nullptr : &found->second;
}

struct Difference {
  std::string name, theirs, ours;
};

std::vector<Difference> compare(const std::string& theirs, const std::string& ours) {
  const Fields their_fields = parse(theirs), our_fields = parse(ours);
  std::vector<Difference> found;
  for (const auto& [name, value] : our_fields) {
    const std::string* other = find(their_fields, name);
    if (!other || *other != value) found.push_back({name, other ? *other : "", value});
  }
  for (const auto& [name, value] : their_fields) {
    if (!find(our_fields, name)) found.push_back({name, value, ""});
  }
  return found;
}

// The words that only `text` has, as far as they are few.
std::string own_words(const std::string& text, const std::string& other) {
  const std::vector<std::string> all = words(other);
  const std::set<std::string> others(all.begin(), all.end());
  std::string told;
  size_t count = 0;
  for (const std::string& word : words(text)) {
    if (others.count(word)) continue;
    if (++count <= kMaxWords) told += (told.empty() ? "" : " ") + word;
  }
  if (count > kMaxWords) told += " ...";
  return told;
}

std::string in_words(const Difference& difference) {
  auto [name, theirs, ours] = difference;
  if (std::max(theirs.size(), ours.size()) > kShort) {
    std::tie(theirs, ours) = std::pair(own_words(theirs, ours), own_words(ours, theirs));
  }
  const auto or_none = [](const std::string& value) { return value.empty() ? "none" : value; };
  return name + " " + or_none(theirs) + " instead of " + or_none(ours);
}

}  // namespace

std::string environment(const std::string& platform, const pjrt::Topology& topology,
                        const Fields& lowering) {
  Fields fields{{"platform", platform},
                {"device", topology.devices().at(0).kind},
                {"platform version", topology.platform_version()},
                {"plugin", library(topology.plugin())}};
  if (topology.platform_name() == "cpu") {
    fields.emplace_back("instruction sets", instruction_sets());
  }
  if (topology.processes() > 1) {
    fields.emplace_back("processes", std::to_string(topology.processes()));
  }
  fields.emplace_back("compile options", in_text(topology.compile_options()));
  for (const char* name : {"XLA_FLAGS", "LIBTPU_INIT_ARGS"}) {
    fields.emplace_back(name, variable(name));
  }
  fields.insert(fields.end(), lowering.begin(), lowering.end());
  std::string text;
  for (const auto& [name, value] : fields) text += name + ": " + on_one_line(value) + "\n";
  return text;
}

size_t count_differences(const std::string& theirs, const std::string& ours) {
  return compare(theirs, ours).size();
}

std::string differences(const std::string& theirs, const std::string& ours) {
  std::string text;
  for (const Difference& difference : compare(theirs, ours)) {
    text += (text.empty() ? "" : ", ") + in_words(difference);
  }
  return text;
}

}  // namespace lazyxla::graph
