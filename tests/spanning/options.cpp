#include "options.h"

#include "wire.h"

namespace spanning {
namespace {

// The fields of XLA's compile_options.proto and xla_data.proto that matter here.
enum CompileOptions { kBuildOptions = 3, kPortable = 4 };
enum BuildOptions { kNumReplicas = 4, kNumPartitions = 5, kDeviceAssignment = 9 };
enum Assignment { kReplicaCount = 1, kComputationCount = 2, kComputationDevices = 3 };
enum ComputationDevices { kReplicaDeviceIds = 1 };

}  // namespace

std::string with_devices(std::string_view options, const Assign& assign) {
  int replicas = 1, partitions = 1;
  bool decided = false;
  wire::Field field;
  for (wire::Reader all(options); all.next(field);) {
    if (field.number == kPortable) decided = decided || field.value != 0;
    if (field.number != kBuildOptions) continue;
    for (wire::Reader build(field.bytes); build.next(field);) {
      if (field.number == kNumReplicas) replicas = static_cast<int>(field.value);
      if (field.number == kNumPartitions) partitions = static_cast<int>(field.value);
      if (field.number == kDeviceAssignment) decided = true;
    }
  }
  std::string result(options);
  if (decided || replicas < 1 || partitions < 1) return result;

  const std::vector<int> devices = assign(replicas, partitions);
  wire::Writer assignment;
  assignment.varint(kReplicaCount, replicas);
  assignment.varint(kComputationCount, partitions);
  for (int partition = 0; partition < partitions; ++partition) {
    wire::Writer computation;
    for (int replica = 0; replica < replicas; ++replica) {
      computation.varint(kReplicaDeviceIds, devices[replica * partitions + partition]);
    }
    assignment.bytes(kComputationDevices, computation.data);
  }
  wire::Writer build, addition;
  build.bytes(kDeviceAssignment, assignment.data);
  addition.bytes(kBuildOptions, build.data);
  // Messages that follow one another are read as one, merged.
  return result + addition.data;
}

}  // namespace spanning
