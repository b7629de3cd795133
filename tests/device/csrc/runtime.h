// A device that is threads: streams are queues that a thread each works off, memory is the host's, and nothing is finished
// because it was launched. Owns streams, marks (events), memory, faults and the hostile traits. Knows nothing of tensors.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace sim {

constexpr int kDevices = 8;

// What an event marks: done once its stream has come to it.
struct Mark {
  explicit Mark(int of) : device(of) {}
  const int device;
  std::atomic<bool> done{false};
};
using MarkPtr = std::shared_ptr<Mark>;
using Work = std::function<void()>;

// How hostile the device is. Numbers, so that a seed can draw them; all 0 is the mildest device.
enum Trait : int {
  kOneQueue,      // one hardware queue: what is submitted starts in the order of submission, over all streams
  kDelayUs,       // every task begins after a random delay of up to so many microseconds
  kAllocSyncs,    // memory and streams from the driver wait until the device is idle
  kPoison,        // new and freed memory is filled with NaN, in the order of its own stream
  kLateRelease,   // memory that several streams use is not reused before its own has come to the place where it was freed
  kLazyLoad,      // the first use of a kernel waits until the device is idle
  kGarbage,       // what an aborted collective leaves: 0 what was there, 1 half of the result, 2 noise, 3 zeros, 4 an earlier result
  kBlindWatchdog, // the watchdog notices no error and no timeout
  kStuckWatchdog, // the watchdog waits in a call of the device for ever
  kRemoteHangs,   // 1: a collective whose peer is gone does not end before it is aborted; 0: it ends with garbage
  kErrorLagMs,    // so long after an abort the error shows in get_error
  kSeed,
  kTraits
};
const char* trait_name(int trait);
int64_t trait(Trait which);
void set_trait(int which, int64_t value);

// What was done so far, by all threads of the process.
enum Count : int { kSyncs, kFallbackWaits, kSegments, kLoads, kLaunches, kStreams, kCounts };
const char* count_name(int count);
int64_t count(Count which);
void add_count(Count which);

// Every call that begins with this raises the device's sticky error, if it has one.
void check(int device);
void fail(int device, const std::string& error);
std::string error_of(int device);
void clear_error(int device); // no real device can: for tests that go on in the same process

int current_device();
void set_device(int device);
int current_stream(int device);
int exchange_stream(int device, int stream);
int new_stream(int device);

void launch(int device, int stream, Work work);
void load_kernel(int device, const std::string& name);
MarkPtr record(int device, int stream);
void wait_for(int device, int stream, MarkPtr mark);
bool idle(int device, int stream);
void synchronize(int device, int stream, Count counted = kSyncs);
void synchronize_device(int device);
void synchronize_mark(const MarkPtr& mark);

void hang(int device, int stream);
int hung(int device); // kernels that hang now
void release_hung(int device);

// The memory of a device: freed blocks go to the stream that they were allocated on.
struct Block;
Block* allocate(int device, std::size_t bytes);
void* pointer(const Block* block);
void release(Block* block);
void used_on(Block* block, int stream);
int64_t bytes_allocated(int device);

// A pseudo-random number of the device's seed; any thread.
uint64_t draw();

// Waits with Python's lock given back, where this thread has it.
void blocking(const std::function<void()>& wait);

} // namespace sim
