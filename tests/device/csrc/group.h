// A process group of the device that behaves as torch's for NCCL is documented to; gloo carries the bytes.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "runtime.h"

namespace sim {

// One communicator: what its works and its watchdog share.
struct Communicator {
  std::atomic<bool> aborted{false};
  std::atomic<bool> closing{false};
  std::atomic<int> broken{0};          // c10d::ErrorType of what has happened
  std::atomic<int> reported{0};        // what get_error says: the watchdog has seen it
  std::atomic<int64_t> aborted_at{0};  // milliseconds, monotonic
  std::mutex mutex;
  std::condition_variable changed;
  struct Flight {
    MarkPtr mark;
    int64_t deadline; // milliseconds, monotonic
  };
  std::deque<Flight> flights; // guarded by mutex
  std::map<std::size_t, at::Tensor> results; // the last ones, by their bytes: the stream's thread alone
  void abort(c10d::ErrorType reason);
};

class Group : public c10d::Backend {
 public:
  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;
  using Tensors = std::vector<at::Tensor>;

  Group(c10::intrusive_ptr<c10d::Backend> inner, int rank, int size, int64_t timeout_ms);
  ~Group() override;

  const std::string getBackendName() const override { return "simccl"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;
  c10d::ErrorType getError() override;
  void abort() override { communicator_->abort(c10d::ErrorType::COMM_ERROR); }
  void shutdown() override {}
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ms_ = timeout.count(); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  c10::intrusive_ptr<c10d::Work> broadcast(Tensors&, const c10d::BroadcastOptions&) override;
  c10::intrusive_ptr<c10d::Work> allreduce(Tensors&, const c10d::AllreduceOptions&) override;
  c10::intrusive_ptr<c10d::Work> reduce(Tensors&, const c10d::ReduceOptions&) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions&) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter(
      Tensors&, std::vector<Tensors>&, const c10d::ReduceScatterOptions&) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor&, at::Tensor&, const c10d::ReduceScatterOptions&) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor&, at::Tensor&, std::vector<int64_t>&, std::vector<int64_t>&, const c10d::AllToAllOptions&) override;
  c10::intrusive_ptr<c10d::Work> send(Tensors&, int, int) override;
  c10::intrusive_ptr<c10d::Work> recv(Tensors&, int, int) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override;

 private:
  // Carries out one collective on copies in host memory: called once the stream has come to it, from any thread.
  using Carry = std::function<Works(Tensors& inputs, Tensors& outputs)>;
  struct Part {
    Tensors inputs, outputs;
    Carry carry;
    bool in_place_kept = false; // an output that is an input's memory is not written (NCCL's gather in place)
  };
  c10::intrusive_ptr<c10d::Work> submit(
      c10d::OpType type, Tensors inputs, Tensors outputs, Carry carry, bool in_place_kept = false);
  c10::intrusive_ptr<c10d::Work> start(c10d::OpType type, std::vector<Part> parts, int64_t timeout_ms);
  void watch();

  c10::intrusive_ptr<c10d::Backend> inner_;
  std::shared_ptr<Communicator> communicator_;
  int64_t timeout_ms_;
  uint64_t sequence_ = 0;
  int stream_ = -1;
  std::atomic<int> device_{-1}; // where its works run: known with the first
  bool coalescing_ = false;
  std::vector<Part> coalesced_;
  std::thread watchdog_;
};

} // namespace sim
