#include "group.h"

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <map>

#include "torch_device.h"

namespace sim {

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

int64_t now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// torch reads these when a group is made; unset, they have torch's own values.
int setting(const char* name, int standard) {
  const char* value = std::getenv(name);
  return value == nullptr ? standard : std::atoi(value);
}

// What has become of one collective's bytes, which a thread of its own carries: that one may wait for ever for a peer.
struct Carried {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  bool failed = false;
};

void spoil(at::Tensor& output, const std::map<std::size_t, at::Tensor>& earlier) {
  if (output.numel() == 0) {
    return;
  }
  switch (trait(kGarbage)) {
    case 2:
      std::generate_n(static_cast<char*>(output.data_ptr()), output.nbytes(), [] { return static_cast<char>(draw()); });
      break;
    case 3:
      output.zero_();
      break;
    case 4:
      if (auto last = earlier.find(output.nbytes()); last != earlier.end() && last->second.dtype() == output.dtype()) {
        output.copy_(last->second.view(output.sizes()));
      }
      break;
    default:
      break; // what was there: this rank's own contribution, or an earlier step's
  }
}

class SimWork : public c10d::Work {
 public:
  SimWork(int rank, c10d::OpType type, int device, MarkPtr mark, std::shared_ptr<Communicator> communicator, int64_t deadline)
      : Work(rank, type),
        device_(device),
        mark_(std::move(mark)),
        communicator_(std::move(communicator)),
        deadline_(deadline),
        blocks_(setting("TORCH_NCCL_BLOCKING_WAIT", 0) != 0) {}

  bool isCompleted() override {
    check(device_);
    return mark_->done.load();
  }
  bool isSuccess() const override { return true; } // errors show in get_error only
  std::exception_ptr exception() const override { return nullptr; }
  void synchronize() override { wait_for(device_, current_stream(device_), mark_); }

  bool wait(std::chrono::milliseconds timeout) override {
    synchronize();
    if (!blocks_ && timeout == kNoTimeout) {
      return true;
    }
    const int64_t end = timeout == kNoTimeout ? deadline_ : now_ms() + timeout.count();
    bool late = false;
    blocking([&] {
      while (!mark_->done.load() && !(late = now_ms() > end)) {
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
    });
    if (late) {
      communicator_->abort(c10d::ErrorType::TIMEOUT);
      throw std::runtime_error("simccl: a collective timed out; its communicator was aborted");
    }
    check(device_);
    return true;
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  std::vector<at::Tensor> result() override { return outputs_; }

  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::vector<at::Tensor> outputs_;

 private:
  int device_;
  MarkPtr mark_;
  std::shared_ptr<Communicator> communicator_;
  int64_t deadline_;
  bool blocks_;
};

std::vector<at::Tensor> flat(const std::vector<std::vector<at::Tensor>>& lists) {
  TORCH_CHECK(lists.size() == 1, "simccl: got ", lists.size(), " lists of tensors, expected one");
  return lists[0];
}

Group::Works one(c10::intrusive_ptr<c10d::Work> work) {
  return {std::move(work)};
}

} // namespace

void Communicator::abort(c10d::ErrorType reason) {
  if (!aborted.exchange(true)) {
    int none = 0;
    broken.compare_exchange_strong(none, static_cast<int>(reason));
    aborted_at = now_ms();
  }
  std::lock_guard<std::mutex> lock(mutex);
  changed.notify_all();
}

Group::Group(c10::intrusive_ptr<c10d::Backend> inner, int rank, int size, int64_t timeout_ms)
    : Backend(rank, size),
      inner_(std::move(inner)),
      communicator_(std::make_shared<Communicator>()),
      timeout_ms_(timeout_ms),
      watchdog_([this] { watch(); }) {}

Group::~Group() {
  communicator_->closing = true;
  watchdog_.join();
}

c10d::ErrorType Group::getError() {
  if (communicator_->aborted && now_ms() - communicator_->aborted_at >= trait(kErrorLagMs)) {
    return static_cast<c10d::ErrorType>(communicator_->broken.load());
  }
  return static_cast<c10d::ErrorType>(communicator_->reported.load());
}

// What torch's watchdog does with the settings that ttp/nccl.py names. It runs beside everything, and may see nothing.
void Group::watch() {
  const int handling = setting("TORCH_NCCL_ASYNC_ERROR_HANDLING", 3);
  const bool rethrows = setting("TORCH_NCCL_RETHROW_CUDA_ERRORS", 1) != 0;
  const bool monitored = setting("TORCH_NCCL_ENABLE_MONITORING", 1) != 0;
  const int64_t heartbeat_ms = 1000ll * setting("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", 480);
  int64_t beat = now_ms();
  auto& shared = *communicator_;
  while (!shared.closing) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    if (trait(kStuckWatchdog)) {
      if (monitored && now_ms() - beat > heartbeat_ms) {
        std::cerr << "simccl: the watchdog of rank " << rank_ << " is stuck in a call of the device" << std::endl;
        std::abort();
      }
      continue;
    }
    beat = now_ms();
    const int device = device_;
    if (rethrows && device >= 0 && !error_of(device).empty()) {
      std::cerr << "simccl: the watchdog of rank " << rank_ << " got: " << error_of(device) << std::endl;
      std::abort();
    }
    if (trait(kBlindWatchdog)) {
      continue;
    }
    int seen = shared.broken;
    {
      std::lock_guard<std::mutex> lock(shared.mutex);
      while (!shared.flights.empty() && shared.flights.front().mark->done) {
        shared.flights.pop_front();
      }
      if (!seen && !shared.flights.empty() && now_ms() > shared.flights.front().deadline) {
        seen = static_cast<int>(c10d::ErrorType::TIMEOUT);
        shared.broken = seen;
      }
    }
    if (seen && !shared.reported.exchange(seen)) {
      if (handling == 1 || handling == 2) {
        shared.abort(static_cast<c10d::ErrorType>(seen));
      }
      if (handling == 1 || handling == 3) {
        std::cerr << "simccl: the watchdog ends rank " << rank_ << std::endl;
        std::abort();
      }
    }
  }
}

void Group::startCoalescing() {
  coalescing_ = true;
  coalesced_.clear();
}

c10::intrusive_ptr<c10d::Work> Group::endCoalescing() {
  coalescing_ = false;
  return start(c10d::OpType::COALESCED, std::move(coalesced_), timeout_ms_);
}

c10::intrusive_ptr<c10d::Work> Group::submit(
    c10d::OpType type, Tensors inputs, Tensors outputs, Carry carry, bool in_place_kept) {
  std::vector<Part> parts;
  parts.push_back(Part{std::move(inputs), std::move(outputs), std::move(carry), in_place_kept});
  if (coalescing_) {
    coalesced_.push_back(std::move(parts[0]));
    return nullptr;
  }
  return start(type, std::move(parts), timeout_ms_);
}

c10::intrusive_ptr<c10d::Work> Group::start(c10d::OpType type, std::vector<Part> parts, int64_t timeout_ms) {
  auto communicator = communicator_;
  TORCH_CHECK(!communicator->aborted, "simccl: the communicator was aborted on rank ", rank_);
  const int device = current_device();
  device_ = device;
  const c10::Device here(kType, static_cast<c10::DeviceIndex>(device));
  if (stream_ < 0) {
    stream_ = new_stream(device);
  }
  sequence_++;
  wait_for(device, stream_, record(device, current_stream(device)));
  Tensors outputs;
  std::vector<Part> hosted;
  for (auto& part : parts) {
    Part host{{}, {}, std::move(part.carry), part.in_place_kept};
    for (const auto& tensor : part.inputs) {
      tensor.record_stream(c10::Stream(c10::Stream::UNSAFE, here, stream_));
      host.inputs.push_back(on_host(tensor));
    }
    for (const auto& tensor : part.outputs) {
      tensor.record_stream(c10::Stream(c10::Stream::UNSAFE, here, stream_));
      host.outputs.push_back(on_host(tensor));
      outputs.push_back(tensor);
    }
    hosted.push_back(std::move(host));
  }
  auto inner = inner_;
  launch(device, stream_, [hosted, communicator, inner]() mutable {
    const at::NoGradGuard no_grad;
    auto carried = std::make_shared<Carried>();
    auto copies = std::make_shared<std::vector<Part>>();
    for (const auto& part : hosted) {
      Part copy{{}, {}, part.carry, part.in_place_kept};
      for (const auto& tensor : part.inputs) {
        copy.inputs.push_back(tensor.clone(at::MemoryFormat::Contiguous));
      }
      for (const auto& tensor : part.outputs) {
        copy.outputs.push_back(at::empty(tensor.sizes(), tensor.options()));
      }
      copies->push_back(std::move(copy));
    }
    const bool begun = !communicator->aborted; // else no peer may get bytes of what this rank does not finish
    if (begun) std::thread([carried, copies, communicator, inner] {
      const at::NoGradGuard no_grad;
      bool failed = false;
      try {
        Works works;
        for (auto& part : *copies) {
          for (auto& work : part.carry(part.inputs, part.outputs)) {
            works.push_back(std::move(work));
          }
        }
        for (auto& work : works) {
          work->wait();
        }
      } catch (const std::exception&) {
        failed = true;
      }
      {
        std::lock_guard<std::mutex> lock(communicator->mutex);
        carried->done = true;
        carried->failed = failed;
      }
      communicator->changed.notify_all();
    }).detach();
    std::unique_lock<std::mutex> lock(communicator->mutex);
    communicator->changed.wait(lock, [&] { return carried->done || communicator->aborted; });
    if (carried->done && carried->failed && !communicator->aborted) {
      int none = 0;
      communicator->broken.compare_exchange_strong(none, static_cast<int>(c10d::ErrorType::COMM_ERROR));
      if (trait(kRemoteHangs)) {
        communicator->changed.wait(lock, [&] { return communicator->aborted.load(); });
      }
    }
    const bool whole = carried->done && !carried->failed && !communicator->aborted;
    const bool half = !whole && trait(kGarbage) == 1 && carried->done && !carried->failed;
    lock.unlock();
    for (std::size_t part = 0; part < hosted.size(); part++) {
      for (std::size_t place = 0; place < hosted[part].outputs.size(); place++) {
        at::Tensor& output = hosted[part].outputs[place];
        if (hosted[part].in_place_kept && output.data_ptr() == hosted[part].inputs[0].data_ptr()) {
          continue;
        }
        if (whole) {
          output.copy_((*copies)[part].outputs[place]);
          communicator->results[output.nbytes()] = (*copies)[part].outputs[place];
        } else if (half && output.dim() == 1) {
          const int64_t count = output.numel() / 2;
          output.narrow(0, 0, count).copy_((*copies)[part].outputs[place].narrow(0, 0, count));
        } else {
          spoil(output, communicator->results);
        }
      }
    }
  });
  const MarkPtr mark = record(device, stream_);
  const int64_t deadline = now_ms() + timeout_ms;
  {
    std::lock_guard<std::mutex> lock(communicator->mutex);
    communicator->flights.push_back({mark, deadline});
  }
  auto work = c10::make_intrusive<SimWork>(rank_, type, device, mark, communicator, deadline);
  work->outputs_ = outputs;
  {
    const c10::StreamGuard on(c10::Stream(c10::Stream::UNSAFE, here, stream_));
    work->future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{here});
    work->future_->markCompleted(c10::IValue(outputs));
  }
  return work;
}

c10::intrusive_ptr<c10d::Work> Group::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  auto inner = inner_;
  return submit(c10d::OpType::BROADCAST, tensors, tensors, [inner, options](Tensors& inputs, Tensors& outputs) {
    outputs[0].copy_(inputs[0]);
    return one(inner->broadcast(outputs, options));
  });
}

c10::intrusive_ptr<c10d::Work> Group::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  auto inner = inner_;
  const bool average = options.reduceOp == c10d::ReduceOp::AVG;
  c10d::AllreduceOptions summed = options;
  summed.reduceOp = average ? c10d::ReduceOp(c10d::ReduceOp::SUM) : options.reduceOp;
  const int size = size_;
  return submit(c10d::OpType::ALLREDUCE, tensors, tensors, [=](Tensors& inputs, Tensors& outputs) {
    outputs[0].copy_(inputs[0]);
    auto work = inner->allreduce(outputs, summed);
    if (average) {
      work->wait();
      outputs[0].div_(size);
      return Works{};
    }
    return one(work);
  });
}

c10::intrusive_ptr<c10d::Work> Group::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  auto inner = inner_;
  return submit(c10d::OpType::REDUCE, tensors, tensors, [inner, options](Tensors& inputs, Tensors& outputs) {
    outputs[0].copy_(inputs[0]);
    return one(inner->reduce(outputs, options));
  });
}

c10::intrusive_ptr<c10d::Work> Group::allgather(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  auto inner = inner_;
  return submit(c10d::OpType::ALLGATHER, inputs, flat(outputs), [inner, options](Tensors& in, Tensors& out) {
    std::vector<Tensors> lists{out};
    return one(inner->allgather(lists, in, options));
  }, true);
}

c10::intrusive_ptr<c10d::Work> Group::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  std::vector<Tensors> outputs{{}};
  for (const auto& chunk : output.view({size_, -1}).unbind(0)) {
    outputs[0].push_back(chunk.view(input.sizes()));
  }
  Tensors inputs{input};
  return allgather(outputs, inputs, options);
}

// In one order of the ranks, so that the sum has the same bits whoever adds it up.
c10::intrusive_ptr<c10d::Work> Group::reduce_scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions&) {
  auto inner = inner_;
  const int size = size_;
  return submit(c10d::OpType::REDUCE_SCATTER, flat(inputs), {outputs[0]}, [inner, size](Tensors& in, Tensors& out) {
    at::Tensor given = at::stack(in), received = at::empty_like(given);
    std::vector<int64_t> none;
    inner->alltoall_base(received, given, none, none, c10d::AllToAllOptions())->wait();
    out[0].copy_(received[0]);
    for (int rank = 1; rank < size; rank++) {
      out[0].add_(received[rank]);
    }
    return Works{};
  });
}

c10::intrusive_ptr<c10d::Work> Group::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  std::vector<Tensors> inputs{{}};
  for (const auto& chunk : input.view({size_, -1}).unbind(0)) {
    inputs[0].push_back(chunk.view(output.sizes()));
  }
  Tensors outputs{output};
  return reduce_scatter(outputs, inputs, options);
}

c10::intrusive_ptr<c10d::Work> Group::alltoall_base(
    at::Tensor& output,
    at::Tensor& input,
    std::vector<int64_t>& output_sizes,
    std::vector<int64_t>& input_sizes,
    const c10d::AllToAllOptions& options) {
  auto inner = inner_;
  return submit(
      c10d::OpType::ALLTOALL_BASE, {input}, {output},
      [inner, options, output_sizes, input_sizes](Tensors& in, Tensors& out) mutable {
        return one(inner->alltoall_base(out[0], in[0], output_sizes, input_sizes, options));
      });
}

c10::intrusive_ptr<c10d::Work> Group::send(Tensors& tensors, int to, int tag) {
  auto inner = inner_;
  return submit(c10d::OpType::SEND, tensors, {}, [inner, to, tag](Tensors& inputs, Tensors&) {
    return one(inner->send(inputs, to, tag));
  });
}

c10::intrusive_ptr<c10d::Work> Group::recv(Tensors& tensors, int from, int tag) {
  auto inner = inner_;
  return submit(c10d::OpType::RECV, {}, tensors, [inner, from, tag](Tensors&, Tensors& outputs) {
    return one(inner->recv(outputs, from, tag));
  });
}

c10::intrusive_ptr<c10d::Work> Group::barrier(const c10d::BarrierOptions&) {
  const c10::Device here(kType, static_cast<c10::DeviceIndex>(current_device()));
  Tensors one_number{at::zeros({1}, at::TensorOptions().device(here))};
  auto work = allreduce(one_number, c10d::AllreduceOptions());
  synchronize(current_device(), stream_); // as NCCL's: the host waits
  return work;
}

} // namespace sim
