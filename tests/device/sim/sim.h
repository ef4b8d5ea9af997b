// A stand-in accelerator in host memory: the parts that the other files share.
//
// Operators run at once, by the CPU's kernels over the same bytes, so the numbers are the CPU's.
// What a GPU leaves to chance goes wrong each time: memory is full of NaN when it is new, a copy to
// pinned memory arrives when the host has synchronised and not before, and an access that no stream
// or event orders is reported. SIM_STREAM_DELAY_MS lets what a stream was given be over after half of that
// time to all of it, and SIM_COLLECTIVE_DELAY_MS lets a collective begin so much later: the threads of
// the host and the ranks then pass each other in other orders. SIM_COUNTED_RANDOM=1 gives the generators
// the seed and offset that a GPU's have, on which DTensors build, and so other numbers than the CPU's.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace sim {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 8;
constexpr int kStreams = 16;           // of each device
constexpr int kCollectives = kStreams - 1;  // the stream that carries collectives
constexpr int kHost = kMaxDevices * kStreams;

int device_count();
int64_t setting(const char* name, int64_t otherwise);  // an environment variable

// -- order -----------------------------------------------------------------------------------------

// A lane is a stream of a device, or the host (all its threads count as one). Each lane counts its
// operations; a Clock tells how many of each lane's are known to be over at some moment.
using Clock = std::array<uint64_t, kHost + 1>;

int lane_of(c10::Stream stream);
int current_lane(c10::DeviceIndex device);
c10::Stream stream_of(c10::DeviceIndex device, int number);

extern std::recursive_mutex mutex;  // guards all that follows
Clock clock_of(int lane);
void advance(int lane, const Clock& clock);  // the lane waits for what the clock tells of
uint64_t begin(int lane);                    // an operation, which comes after what the host has seen
using Time = std::chrono::steady_clock;
Time::time_point end_of(const Clock& clock);  // when what it tells of is over
void host_waits_for(const Clock& clock);      // without the mutex: it may sleep
void host_waits_for(const Clock& clock, Time::time_point end);
void host_hears_of(const Clock& clock);      // without a wait: it asked, and it is over
bool host_has_seen(const Clock& clock);
void set_stream_delay(int64_t milliseconds);

// Names what runs in this thread, for reports.
struct Doing {
  explicit Doing(const char* name);
  ~Doing();
  const char* before;
};
const char* doing();
void report(const std::string& text);
std::vector<std::string> take_reports();

// Which streams a thread uses.
extern thread_local c10::DeviceIndex current_device;
extern thread_local std::array<int, kMaxDevices> current_streams;

// -- memory ----------------------------------------------------------------------------------------

// Device pointers have a bit that no valid address has, so the host can't read through them.
char* real(const void* pointer);

at::Allocator* device_allocator();
at::Allocator* pinned_allocator();
void record_stream(const c10::DataPtr& data, int lane);
void resize(const c10::Storage& storage, size_t bytes);
c10::Storage adopt(const c10::Storage& cpu, c10::DeviceIndex device);  // memory of a CPU kernel
void note_access(const at::Tensor& tensor, int lane, uint64_t when, bool writes);
bool is_pinned(const void* pointer);

// Copies between pinned memory and a device that the host has not waited for.
// Both are tensors of the CPU, with the same strides; `numbers` are those that arrive, or were sent.
void start_copy(const at::Tensor& host, const at::Tensor& numbers, bool to_host, int lane, uint64_t when);
void order_copies(const at::Tensor& host, int lane);  // before another one of this memory
void report_changed_sources();  // of copies to a device that the host has not waited for

int64_t bytes_held(c10::DeviceIndex device);
int64_t bytes_at_peak(c10::DeviceIndex device);
void reset_peak(c10::DeviceIndex device);
void set_limit(c10::DeviceIndex device, int64_t bytes);
void check_room(c10::DeviceIndex device, size_t bytes);  // raises OutOfMemoryError

// -- tensors ---------------------------------------------------------------------------------------

at::Tensor as_cpu(const at::Tensor& tensor);  // the same bytes as a tensor of the CPU
at::Tensor as_sim(const c10::Storage& storage, const at::Tensor& like);
const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);
at::Generator inner_generator(const at::Generator& generator);  // the CPU's, for one operation

void note_use();     // of a device, by this process
bool is_used();
void refuse_fork();  // raises where a process that has used a device has forked this one

void fail_late(const std::string& text);  // from now on as after an error of a kernel: not at its call
void tell_fault();
int64_t waits();  // how often the host has waited for a device
}  // namespace sim
