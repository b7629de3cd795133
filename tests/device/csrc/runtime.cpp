#include "runtime.h"

#include <Python.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <tuple>

namespace sim {

namespace {

const char* const kTraitNames[kTraits] = {
    "one_queue",  "delay_us", "alloc_syncs",    "poison",         "late_release", "lazy_load",
    "garbage",    "blind_watchdog", "stuck_watchdog", "remote_hangs", "error_lag_ms", "seed"};
const char* const kCountNames[kCounts] = {"syncs", "fallback_waits", "segments", "loads", "launches", "streams"};

std::array<std::atomic<int64_t>, kTraits> traits{};
std::array<std::atomic<int64_t>, kCounts> counts{};
std::atomic<uint64_t> drawn{0};

struct Task {
  Work work;
  MarkPtr waits_for; // starts when this is done
  MarkPtr marks; // done when it has ended, whatever became of it
  uint64_t ticket = 0;
};

struct Stream {
  std::deque<Task> tasks;
  std::condition_variable submitted; // a stream without tasks is not woken by what the others do
  bool busy = false;
  bool started = false;
};

// One lock, and one condition for all that is in progress, for a whole device: nothing here is fast, all of it is in order.
struct Device {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::unique_ptr<Stream>> streams;
  std::string error;
  uint64_t submitted = 0;
  uint64_t started = 0;
  int hung = 0;
  uint64_t releases = 0;
  std::set<std::string> loaded;
};

Device* devices() {
  static Device* all = new Device[kDevices]; // never destroyed: threads may outlive the interpreter
  return all;
}

std::atomic<pid_t> owner{0};

thread_local int the_device = 0;
thread_local std::array<int, kDevices> the_streams{};

[[noreturn]] void raise(const std::string& text) {
  throw std::runtime_error(text);
}

// Threads do not survive a fork, as a context of a real device does not.
void begin() {
  pid_t expected = 0;
  if (!owner.compare_exchange_strong(expected, getpid()) && expected != getpid()) {
    raise("sim: the device was used before this process was forked; begin to use it after the fork");
  }
}

bool all_idle(const Device& device) {
  for (const auto& stream : device.streams) {
    if (stream && (stream->busy || !stream->tasks.empty())) {
      return false;
    }
  }
  return true;
}

void work_off(Device& device, Stream& stream) {
  std::unique_lock<std::mutex> lock(device.mutex);
  while (true) {
    stream.submitted.wait(lock, [&] { return !stream.tasks.empty(); });
    Task task = std::move(stream.tasks.front());
    stream.tasks.pop_front();
    stream.busy = true;
    device.changed.wait(lock, [&] {
      const bool turn = !trait(kOneQueue) || device.started + 1 >= task.ticket;
      return turn && (!task.waits_for || task.waits_for->done.load());
    });
    device.started = std::max(device.started, task.ticket);
    const bool failed = !device.error.empty();
    device.changed.notify_all();
    if (task.work && !failed) {
      lock.unlock();
      if (const auto delay = trait(kDelayUs)) {
        std::this_thread::sleep_for(std::chrono::microseconds(draw() % delay));
      }
      std::string error;
      try {
        task.work();
      } catch (const std::exception& raised) {
        error = raised.what();
        error = error.substr(0, error.find("\nException raised from"));
      }
      task.work = nullptr; // what it holds ends here, not with the lock
      lock.lock();
      if (!error.empty() && device.error.empty()) {
        device.error = error;
      }
    }
    if (task.marks) {
      task.marks->done = true;
    }
    stream.busy = false;
    device.changed.notify_all();
  }
}

Stream& stream_of(Device& device, int number) {
  while (static_cast<int>(device.streams.size()) <= number) {
    device.streams.push_back(std::make_unique<Stream>());
  }
  Stream& stream = *device.streams[number];
  if (!stream.started) {
    stream.started = true;
    std::thread([&device, &stream] { work_off(device, stream); }).detach();
  }
  return stream;
}

void submit(int number, int stream, Work work, MarkPtr waits_for = nullptr, MarkPtr marks = nullptr) {
  begin();
  Device& device = devices()[number];
  std::lock_guard<std::mutex> lock(device.mutex);
  Stream& chosen = stream_of(device, stream);
  chosen.tasks.push_back(Task{std::move(work), std::move(waits_for), std::move(marks), ++device.submitted});
  chosen.submitted.notify_one();
}

template <typename Condition>
void wait_until(Device& device, Condition condition) {
  blocking([&] {
    std::unique_lock<std::mutex> lock(device.mutex);
    device.changed.wait(lock, [&] { return !device.error.empty() || condition(); });
  });
}

} // namespace

const char* trait_name(int which) { return kTraitNames[which]; }
int64_t trait(Trait which) { return traits[which].load(std::memory_order_relaxed); }
const char* count_name(int which) { return kCountNames[which]; }
int64_t count(Count which) { return counts[which].load(); }
void add_count(Count which) { counts[which]++; }

void set_trait(int which, int64_t value) {
  traits[which].store(value);
  for (int number = 0; number < kDevices; number++) {
    std::lock_guard<std::mutex> lock(devices()[number].mutex);
    devices()[number].changed.notify_all();
  }
}

uint64_t draw() {
  uint64_t value = static_cast<uint64_t>(trait(kSeed)) + 0x9e3779b97f4a7c15ull * ++drawn; // splitmix64
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

void blocking(const std::function<void()>& wait) {
  if (Py_IsInitialized() && PyGILState_Check()) {
    PyThreadState* state = PyEval_SaveThread();
    try {
      wait();
    } catch (...) {
      PyEval_RestoreThread(state);
      throw;
    }
    PyEval_RestoreThread(state);
  } else {
    wait();
  }
}

std::string error_of(int device) {
  std::lock_guard<std::mutex> lock(devices()[device].mutex);
  return devices()[device].error;
}

void check(int device) {
  const std::string error = error_of(device);
  if (!error.empty()) {
    raise("sim error on device " + std::to_string(device) + ": " + error);
  }
}

void fail(int device, const std::string& error) {
  std::lock_guard<std::mutex> lock(devices()[device].mutex);
  devices()[device].error = error;
  devices()[device].changed.notify_all();
}

void clear_error(int device) {
  fail(device, "");
}

int current_device() { return the_device; }

void set_device(int device) {
  if (device < 0 || device >= kDevices) {
    raise("sim: invalid device " + std::to_string(device));
  }
  the_device = device;
}

int current_stream(int device) { return the_streams[device]; }

int exchange_stream(int device, int stream) {
  const int before = the_streams[device];
  the_streams[device] = stream;
  return before;
}

int new_stream(int device) {
  check(device);
  add_count(kStreams);
  if (trait(kAllocSyncs)) {
    wait_until(devices()[device], [&] { return all_idle(devices()[device]); });
  }
  std::lock_guard<std::mutex> lock(devices()[device].mutex);
  if (devices()[device].streams.empty()) {
    devices()[device].streams.push_back(std::make_unique<Stream>()); // the default stream
  }
  devices()[device].streams.push_back(std::make_unique<Stream>());
  return static_cast<int>(devices()[device].streams.size()) - 1;
}

void launch(int device, int stream, Work work) {
  check(device);
  add_count(kLaunches);
  submit(device, stream, std::move(work));
}

void load_kernel(int number, const std::string& name) {
  Device& device = devices()[number];
  {
    std::lock_guard<std::mutex> lock(device.mutex);
    if (!device.loaded.insert(name).second) {
      return;
    }
  }
  add_count(kLoads);
  if (trait(kLazyLoad)) {
    wait_until(device, [&] { return all_idle(device); });
  }
}

MarkPtr record(int device, int stream) {
  check(device);
  auto mark = std::make_shared<Mark>(device);
  submit(device, stream, nullptr, nullptr, mark);
  return mark;
}

void wait_for(int device, int stream, MarkPtr mark) {
  check(device);
  submit(device, stream, nullptr, std::move(mark));
}

bool idle(int number, int which) {
  check(number);
  Device& device = devices()[number];
  std::lock_guard<std::mutex> lock(device.mutex);
  return which >= static_cast<int>(device.streams.size()) ||
      (!device.streams[which]->busy && device.streams[which]->tasks.empty());
}

void synchronize(int number, int which, Count counted) {
  check(number);
  add_count(counted);
  Device& device = devices()[number];
  wait_until(device, [&] {
    return which >= static_cast<int>(device.streams.size()) ||
        (!device.streams[which]->busy && device.streams[which]->tasks.empty());
  });
  check(number);
}

void synchronize_device(int number) {
  check(number);
  add_count(kSyncs);
  Device& device = devices()[number];
  wait_until(device, [&] { return all_idle(device); });
  check(number);
}

void synchronize_mark(const MarkPtr& mark) {
  check(mark->device);
  add_count(kSyncs);
  wait_until(devices()[mark->device], [&] { return mark->done.load(); });
  check(mark->device);
}

void hang(int number, int stream) {
  Device& device = devices()[number];
  uint64_t before;
  {
    std::lock_guard<std::mutex> lock(device.mutex);
    before = device.releases; // one that is still queued when kernels are released does not hang any more
  }
  launch(number, stream, [&device, before] {
    std::unique_lock<std::mutex> lock(device.mutex);
    device.hung++;
    device.changed.notify_all();
    device.changed.wait(lock, [&] { return device.releases != before || !device.error.empty(); });
    device.hung--;
  });
}

int hung(int device) {
  std::lock_guard<std::mutex> lock(devices()[device].mutex);
  return devices()[device].hung;
}

void release_hung(int device) {
  std::lock_guard<std::mutex> lock(devices()[device].mutex);
  devices()[device].releases++;
  devices()[device].changed.notify_all();
}

// --- memory ---

struct Block {
  void* memory;
  std::size_t bytes;
  int device;
  int stream;
  std::set<int> users;     // other streams that use it
  std::vector<MarkPtr> ends; // of their uses, once it is freed
};

namespace {

std::mutex memory_mutex;
std::map<std::tuple<int, int, std::size_t>, std::vector<Block*>> free_blocks;
std::array<std::atomic<int64_t>, kDevices> allocated{};

std::size_t rounded(std::size_t bytes) {
  std::size_t size = 512;
  while (size < bytes) {
    size *= 2;
  }
  return size;
}

Block* reused(int device, int stream, std::size_t bytes) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  auto& candidates = free_blocks[{device, stream, bytes}];
  for (auto place = candidates.rbegin(); place != candidates.rend(); ++place) {
    Block* block = *place;
    bool ended = true;
    for (const auto& mark : block->ends) {
      ended = ended && mark->done.load();
    }
    if (ended) {
      candidates.erase(std::next(place).base());
      block->ends.clear();
      block->users.clear();
      return block;
    }
  }
  return nullptr;
}

void poison(const Block* block) {
  if (trait(kPoison) && error_of(block->device).empty()) {
    void* memory = block->memory;
    const std::size_t bytes = block->bytes;
    submit(block->device, block->stream, [memory, bytes] { std::memset(memory, 0xff, bytes); });
  }
}

// Fill what other streams use as well once they have come to its end, on a stream that holds up no other.
void spoil_later(Block* block) {
  static std::mutex mutex;
  static std::map<std::pair<int, int>, int> beside;
  int stream;
  {
    std::lock_guard<std::mutex> lock(mutex);
    int& known = beside[{block->device, block->stream}];
    if (known == 0) {
      std::lock_guard<std::mutex> device_lock(devices()[block->device].mutex);
      devices()[block->device].streams.push_back(std::make_unique<Stream>());
      known = static_cast<int>(devices()[block->device].streams.size()) - 1;
    }
    stream = known;
  }
  block->ends.push_back(record(block->device, block->stream));
  for (const auto& end : block->ends) {
    wait_for(block->device, stream, end);
  }
  void* memory = block->memory;
  const std::size_t bytes = block->bytes;
  submit(block->device, stream, [memory, bytes] { std::memset(memory, 0xff, bytes); });
  block->ends = {record(block->device, stream)};
}

} // namespace

Block* allocate(int device, std::size_t bytes) {
  check(device);
  const std::size_t size = rounded(bytes);
  const int stream = current_stream(device);
  Block* block = reused(device, stream, size);
  if (block == nullptr) {
    add_count(kSegments);
    if (trait(kAllocSyncs)) {
      wait_until(devices()[device], [&] { return all_idle(devices()[device]); });
      check(device);
    }
    void* memory = std::aligned_alloc(64, size);
    if (memory == nullptr) {
      raise("sim: out of memory");
    }
    block = new Block{memory, size, device, stream, {}, {}};
  }
  allocated[device] += static_cast<int64_t>(block->bytes);
  poison(block);
  return block;
}

void* pointer(const Block* block) { return block->memory; }

void release(Block* block) {
  allocated[block->device] -= static_cast<int64_t>(block->bytes);
  if (error_of(block->device).empty()) {
    for (const int user : block->users) {
      block->ends.push_back(record(block->device, user));
    }
    if (block->users.empty()) {
      poison(block);
    } else if (trait(kPoison) && !trait(kOneQueue)) {
      spoil_later(block);
    }
    if (trait(kLateRelease) && !block->users.empty()) { // its own stream may have it again at once, as on a real device
      block->ends.push_back(record(block->device, block->stream));
    }
  }
  std::lock_guard<std::mutex> lock(memory_mutex);
  free_blocks[{block->device, block->stream, block->bytes}].push_back(block);
}

void used_on(Block* block, int stream) {
  if (stream != block->stream) {
    std::lock_guard<std::mutex> lock(memory_mutex);
    block->users.insert(stream);
  }
}

int64_t bytes_allocated(int device) { return allocated[device]; }

} // namespace sim
