#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "group.h"
#include "runtime.h"
#include "torch_device.h"

namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  m.attr("DEVICES") = kDevices;
  m.def("register_hooks", register_hooks);
  m.def("set_trait", [](const std::string& name, int64_t value) {
    for (int which = 0; which < kTraits; which++) {
      if (name == trait_name(which)) {
        return set_trait(which, value);
      }
    }
    throw py::key_error(name);
  });
  m.def("traits", [] {
    std::map<std::string, int64_t> all;
    for (int which = 0; which < kTraits; which++) {
      all[trait_name(which)] = trait(static_cast<Trait>(which));
    }
    return all;
  });
  m.def("counts", [] {
    std::map<std::string, int64_t> all;
    for (int which = 0; which < kCounts; which++) {
      all[count_name(which)] = count(static_cast<Count>(which));
    }
    return all;
  });
  m.def("fail", fail);
  m.def("error_of", error_of);
  m.def("clear_error", clear_error);
  m.def("check", check);
  m.def("current_device", current_device);
  m.def("set_device", set_device);
  m.def("current_stream", current_stream);
  m.def("set_stream", exchange_stream);
  m.def("synchronize_device", synchronize_device);
  m.def("hang", hang);
  m.def("hung", hung);
  m.def("release_hung", release_hung);
  m.def("sleep", [](int device, int stream, double seconds) {
    launch(device, stream, [seconds] { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); });
  });
  m.def("bytes_allocated", bytes_allocated);

  py::class_<Group, c10::intrusive_ptr<Group>, c10d::Backend>(m, "Group")
      .def(
          py::init<c10::intrusive_ptr<c10d::Backend>, int, int, int64_t>(),
          py::arg("inner"),
          py::arg("rank"),
          py::arg("size"),
          py::arg("timeout_ms"))
      .def("get_error", &Group::getError, py::call_guard<py::gil_scoped_release>());
}
