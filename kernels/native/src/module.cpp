// The extension module: sessions, plans, and what tests look at.
#include "arrays.h"
#include "cpu.h"

#include <nanobind/stl/vector.h>

NB_MODULE(_native, m) {
  using namespace octavo;
  m.doc() = "Octavo's native kernels; see kernels.native.";

  nb::class_<Plan>(m, "Plan").def("__len__", [](const Plan& plan) { return plan.ops.size(); });

  nb::class_<Session> session(m, "Session");
  session.def(nb::init<const std::string&, int>(), nb::arg("isa"), nb::arg("threads"))
      .def_prop_ro("isa", [](const Session& s) { return std::string(s.table.name); })
      .def_prop_ro("threads", &Session::threads)
      .def_prop_ro("recording", &Session::recording)
      .def_prop_ro("recorded", &Session::recorded)
      .def("start_recording", &Session::start_recording)
      .def("finish_recording", &Session::finish_recording)
      .def("abandon_recording", &Session::abandon_recording)
      .def("replay", [](Session& s, Plan& plan) {
        const nb::gil_scoped_release unlocked;
        s.replay(plan);
      })
      .def("replay_timed", [](Session& s, Plan& plan) {
        const nb::gil_scoped_release unlocked;
        return s.replay_timed(plan);
      });

  m.def("available_isas", &available_tables);
  bind_weights(m);
  bind_model(m, session);
  bind_sampling(session);
}
