#pragma once

#include <ATen/core/Tensor.h>

namespace sim {

// The host's view of a tensor's memory, which holds nothing alive.
at::Tensor on_host(const at::Tensor& tensor);

void register_hooks();

} // namespace sim
