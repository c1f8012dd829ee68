// Packed weights as Python sees them.

#include "arrays.h"

namespace octavo {
namespace {

// (format, data [rows, bytes per row] uint8, rows, columns)
HostPart host_part(const nb::tuple& part, std::vector<In>& owners) {
  auto data = nb::cast<In>(part[1]);
  const auto bytes = view<const uint8_t>(data, "weight", 2);
  owners.push_back(data);
  HostPart host{nb::cast<std::string>(part[0]), bytes.data, bytes.stride[0], nb::cast<int64_t>(part[2]),
                nb::cast<int64_t>(part[3])};
  expect(bytes.shape[0] == host.n, "weight", "wrong number of rows");
  expect(host.n <= 1 || bytes.stride[0] == bytes.shape[1], "weight", "rows are not contiguous");
  host.row_bytes = bytes.shape[1];
  const int64_t element = host.format == "F32" ? 4 : host.format == "F16" || host.format == "BF16" ? 2 : 0;
  expect(!element || host.row_bytes == element * host.k, "weight", "wrong number of columns");
  return host;
}

std::shared_ptr<PackedWeight> pack_parts(const nb::list& parts, bool bf16, const std::optional<In>& bias) {
  std::vector<HostPart> hosts;
  std::vector<In> owners;
  for (const nb::handle part : parts) hosts.push_back(host_part(nb::cast<nb::tuple>(part), owners));
  std::vector<float> values;
  if (bias) {
    const auto b = dense<const float>(*bias, "bias", 1);
    values.assign(b.data, b.data + b.last());
  }
  const nb::gil_scoped_release unlocked;
  return std::make_shared<PackedWeight>(pack(hosts, bf16 ? WeightKind::bf16 : WeightKind::f32, std::move(values)));
}

const char* kind_name(WeightKind kind) {
  switch (kind) {
    case WeightKind::f32: return "f32";
    case WeightKind::bf16: return "bf16";
    case WeightKind::q8: return "q8";
    case WeightKind::q4: return "q4";
    case WeightKind::q4_min: return "q4_min";
  }
  return "";
}

}  // namespace

void bind_weights(nb::module_& module) {
  nb::class_<PackedWeight>(module, "PackedWeight")
      .def_ro("rows", &PackedWeight::n)
      .def_ro("columns", &PackedWeight::k)
      .def_ro("nbytes", &PackedWeight::bytes)
      .def_prop_ro("shape", [](const PackedWeight& w) { return nb::make_tuple(w.n, w.k); })
      .def_prop_ro("kinds", [](const PackedWeight& w) {
        nb::list kinds;
        for (const WeightPart& part : w.parts) kinds.append(kind_name(part.kind));
        return kinds;
      });
  module.def("pack", &pack_parts, nb::arg("parts"), nb::arg("bf16"), nb::arg("bias").none());
}

}  // namespace octavo
