#include "bound.h"

namespace gyre::python {

void bind_encoder(nb::module_& module) {
  nb::class_<Fence>(module, "Fence", "A handle of submitted work. Dropping it cancels nothing.")
      .def(
          "wait", [](const Fence& fence) { without_gil([&] { fence.wait(); }); },
          "Waits for the work; raises what went wrong while it ran. Other threads run meanwhile.")
      .def_prop_ro("done", &Fence::done, "Whether the work is complete.")
      .def("__repr__", [](const Fence& fence) {
        return std::string("gyre.Fence(") + (fence.done() ? "done" : "running") + ")";
      });

  nb::class_<Graph>(
      module, "Graph",
      "A recorded list, ready to run any number of times with the same memory. It holds what it "
      "uses.")
      .def(
          "replay", [](const Graph& graph) { return without_gil([&] { return graph.replay(); }); },
          "Runs the list once more and returns its fence.")
      .def_prop_ro("size", &Graph::size, "The number of commands.")
      .def("__len__", &Graph::size, "Returns the number of commands.")
      .def("__repr__", [](const Graph& graph) {
        return "gyre.Graph(" + std::to_string(graph.size()) + " commands)";
      });

  nb::class_<Encoder>(
      module, "Encoder",
      "Collects commands: ops record into it, and nothing runs before submit(). The memory that "
      "commands touch decides which of them wait for which. Recorded commands hold the tensors "
      "they use. One thread at a time may use it. As a context manager it submits and waits at the "
      "end of the block: with gyre.Encoder(\"cuda:0\") as e: ...")
      .def(
          "__init__",
          [](Encoder* self, const DeviceLike& device) { new (self) Encoder(device_of(device)); },
          "device"_a = "cpu", "Records for a device, or for the shared device of a name.")
      .def_prop_ro("device", &Encoder::device, "The device that it records for.")
      .def_prop_ro("size", &Encoder::size, "The number of commands recorded so far.")
      .def("__len__", &Encoder::size, "Returns the number of commands.")
      .def_prop_ro("barriers", &Encoder::barriers,
                   "The number of commands that wait for earlier ones.")
      .def(
          "submit", [](Encoder& encoder) { return without_gil([&] { return encoder.submit(); }); },
          "Runs the list once, leaves the encoder empty and returns a fence.")
      .def(
          "submit_on",
          [](Encoder& encoder, uint64_t stream) {
            return without_gil([&] { return encoder.submit_on(stream); });
          },
          "stream"_a,
          "Runs the list once on a CUDA stream of the caller's, a CUstream as a number "
          "(torch.cuda.current_stream().cuda_stream), in order with everything else on the device. "
          "While the stream is captured, the list becomes part of that graph: keep the fence as "
          "long as the graph may run.")
      .def(
          "instantiate",
          [](Encoder& encoder) { return without_gil([&] { return encoder.instantiate(); }); },
          "Returns the list as a graph for replay and leaves the encoder empty.")
      .def("clear", &Encoder::clear, "Drops what was recorded.")
      .def(
          "__enter__", [](nb::object self) { return self; },
          nb::sig("def __enter__(self) -> Encoder"), "Returns the encoder itself.")
      .def(
          "__exit__",
          [](Encoder& encoder, const nb::object& type, const nb::object&, const nb::object&) {
            if (!type.is_none()) return encoder.clear();
            without_gil([&] { encoder.submit().wait(); });
          },
          "type"_a.none(), "value"_a.none(), "traceback"_a.none(),
          "Submits the list and waits for it. If the block raised, drops the list instead.")
      .def("__repr__", [](const Encoder& encoder) {
        std::ostringstream text;
        text << "gyre.Encoder(" << encoder.size() << " commands, " << encoder.barriers()
             << " barriers, device=" << encoder.device().info().name << ")";
        return text.str();
      });
}

}  // namespace gyre::python
