#include "fingerprint.h"

#include "wire.h"

namespace spanning {
namespace {

// The fields of XLA's hlo.proto that matter here.
enum ModuleWithConfig { kModule = 1 };
enum Module {
  kComputations = 3,
  kModuleId = 5,
  kSchedule = 7,
  kStackFrames = 17,
  kModuleAttributes = 19
};
enum Computation { kInstructions = 2 };
enum Instruction { kMetadata = 7, kInstructionAttributes = 68 };

class Hash {  // FNV-1a
 public:
  uint64_t value = 14695981039346656037u;

  void add(std::string_view bytes) {
    for (const char byte : bytes) {
      value = (value ^ static_cast<unsigned char>(byte)) * 1099511628211u;
    }
  }
  void add(const wire::Field& field) {
    add(field.number);
    add(field.value);
    add(field.bytes.size());
    add(field.bytes);
  }
  // A message whose one field is a map, the order of which is by chance.
  void add_map(std::string_view map) {
    uint64_t sum = 0;
    wire::Field entry;
    for (wire::Reader entries(map); entries.next(entry);) {
      Hash hash;
      hash.add(entry);
      sum += hash.value;
    }
    add(sum);
  }

 private:
  void add(uint64_t number) {
    add(std::string_view(reinterpret_cast<const char*>(&number), sizeof(number)));
  }
};

void add_computation(Hash& hash, std::string_view computation) {
  wire::Field field;
  for (wire::Reader fields(computation); fields.next(field);) {
    if (field.number != kInstructions) {
      hash.add(field);
      continue;
    }
    for (wire::Reader instruction(field.bytes); instruction.next(field);) {
      if (field.number == kInstructionAttributes) {
        hash.add_map(field.bytes);
      } else if (field.number != kMetadata) {
        hash.add(field);
      }
    }
  }
}

}  // namespace

uint64_t fingerprint(std::string_view program, const std::string& devices) {
  Hash hash;
  hash.add(devices);
  wire::Field field;
  for (wire::Reader all(program); all.next(field);) {
    if (field.number != kModule) continue;  // the configuration: options of this process
    for (wire::Reader module(field.bytes); module.next(field);) {
      switch (field.number) {
        case kComputations:
          add_computation(hash, field.bytes);
          break;
        case kModuleAttributes:
          hash.add_map(field.bytes);
          break;
        case kModuleId:     // counts a process' modules
        case kStackFrames:  // of the source, as the metadata of instructions
        case kSchedule:     // a map; follows from the rest
          break;
        default:
          hash.add(field);
      }
    }
  }
  return hash.value;
}

}  // namespace spanning
