// Which operations are known to be over: a vector clock for each stream, and one for the host.
#include "sim.h"

#include <c10/util/Exception.h>

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <random>
#include <thread>
#include <utility>

namespace sim {

std::recursive_mutex mutex;
thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<int, kMaxDevices> current_streams{};

namespace {
std::array<Clock, kHost + 1> clocks{};
std::vector<std::string> reports;

std::array<Time::time_point, kHost> over_at{};  // when what a lane was given last is over
int64_t delay_ms = setting("SIM_STREAM_DELAY_MS", 0);
thread_local const char* name = "";
int64_t host_waits = 0;
std::string fault;  // what a kernel has done wrong behind the host; not empty: each look at the device tells
pid_t user = 0;  // the process that has used a device

void join(Clock& clock, const Clock& other) {
  for (size_t lane = 0; lane < clock.size(); lane++) clock[lane] = std::max(clock[lane], other[lane]);
}
}  // namespace

int64_t setting(const char* variable, int64_t otherwise) {
  const char* text = std::getenv(variable);
  return text && *text ? std::atoll(text) : otherwise;
}

int device_count() {
  static const int count = int(std::min<int64_t>(setting("SIM_DEVICES", 0), kMaxDevices));
  return count;
}

int lane_of(c10::Stream stream) { return stream.device_index() * kStreams + int(stream.id()); }
int current_lane(c10::DeviceIndex device) { return device * kStreams + current_streams[device]; }
c10::Stream stream_of(c10::DeviceIndex device, int number) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, device), number);
}

Clock clock_of(int lane) {
  std::lock_guard lock(mutex);
  return clocks[lane];
}

void advance(int lane, const Clock& clock) {
  std::lock_guard lock(mutex);
  join(clocks[lane], clock);
}

uint64_t begin(int lane) {
  std::lock_guard lock(mutex);
  join(clocks[lane], clocks[kHost]);
  if (delay_ms) {
    static std::minstd_rand random(getpid());  // begun after a fork, so that the ranks differ
    const auto half = std::chrono::milliseconds(delay_ms) / 2;
    const auto taken = half + std::chrono::microseconds(random() % (500 * delay_ms + 1));
    over_at[lane] = std::max(over_at[lane], Time::now() + taken);
  }
  return ++clocks[lane][lane];
}

bool host_has_seen(const Clock& clock) {
  std::lock_guard lock(mutex);
  for (int lane = 0; lane < kHost; lane++)
    if (clock[lane] > clocks[kHost][lane]) return false;
  return true;
}

Time::time_point end_of(const Clock& clock) {
  std::lock_guard lock(mutex);
  Time::time_point end{};
  for (int lane = 0; lane < kHost; lane++)
    if (clock[lane] > clocks[kHost][lane]) end = std::max(end, over_at[lane]);
  return end;
}

void set_stream_delay(int64_t milliseconds) {
  std::lock_guard lock(mutex);
  delay_ms = milliseconds;
}

void deliver_copies();  // memory.cpp

void host_hears_of(const Clock& clock) {
  std::lock_guard lock(mutex);
  join(clocks[kHost], clock);
  deliver_copies();
}

void fail_late(const std::string& text) {
  std::lock_guard lock(mutex);
  fault = text;
}

void tell_fault() {
  std::lock_guard lock(mutex);
  if (!fault.empty()) throw c10::AcceleratorError({__func__, __FILE__, uint32_t(__LINE__)}, 710, fault);
}

void host_waits_for(const Clock& clock) { host_waits_for(clock, end_of(clock)); }

void host_waits_for(const Clock& clock, Time::time_point end) {
  std::this_thread::sleep_until(end);
  std::lock_guard lock(mutex);
  host_waits++;
  host_hears_of(clock);
  tell_fault();
}

int64_t waits() {
  std::lock_guard lock(mutex);
  return host_waits;
}

void note_use() {
  if (!user) user = getpid();
}

bool is_used() { return user != 0; }

void refuse_fork() {
  TORCH_CHECK(!user || user == getpid(),
              "Cannot re-initialize sim in forked subprocess. To use sim with multiprocessing, you must use the "
              "'spawn' start method");
}

Doing::Doing(const char* now) : before(std::exchange(name, now)) {}
Doing::~Doing() { name = before; }
const char* doing() { return name; }

void report(const std::string& text) {
  std::lock_guard lock(mutex);
  if (reports.size() < 1000) reports.push_back(text + " (in " + name + ")");
}

std::vector<std::string> take_reports() {
  std::lock_guard lock(mutex);
  report_changed_sources();
  return std::exchange(reports, {});
}

}  // namespace sim
