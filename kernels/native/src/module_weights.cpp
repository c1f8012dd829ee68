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

std::vector<float> floats(const std::optional<In>& bias) {
  if (!bias) return {};
  const auto b = dense<const float>(*bias, "bias", 1);
  return {b.data, b.data + b.last()};
}

std::shared_ptr<PackedWeight> pack_parts(const nb::list& parts, bool bf16, const std::optional<In>& bias, int threads) {
  expect(threads >= 1, "threads", "needs at least one");
  std::vector<HostPart> hosts;
  std::vector<In> owners;
  for (const nb::handle part : parts) hosts.push_back(host_part(nb::cast<nb::tuple>(part), owners));
  std::vector<float> values = floats(bias);
  const nb::gil_scoped_release unlocked;
  return std::make_shared<PackedWeight>(
      pack(hosts, bf16 ? WeightKind::bf16 : WeightKind::f32, std::move(values), threads));
}

// (kind, groups per scale, exponent, rows, columns) of each part: what attach() has to be told beside the bytes.
nb::list described(const PackedWeight& weight) {
  nb::list parts;
  for (const WeightPart& p : weight.parts)
    parts.append(nb::make_tuple(static_cast<int>(p.kind), p.groups_per_scale, p.exponent, p.n, p.k));
  return parts;
}

std::shared_ptr<PackedWeight> attach_parts(const nb::list& described, const In& data, const std::optional<In>& bias) {
  std::vector<WeightPart> parts;
  for (const nb::handle handle : described) {
    const auto fields = nb::cast<nb::tuple>(handle);
    WeightPart p{};
    p.kind = static_cast<WeightKind>(nb::cast<int>(fields[0]));
    p.groups_per_scale = nb::cast<int32_t>(fields[1]);
    p.exponent = nb::cast<int32_t>(fields[2]);
    p.n = nb::cast<int64_t>(fields[3]);
    p.k = nb::cast<int64_t>(fields[4]);
    parts.push_back(p);
  }
  const auto bytes = dense<const uint8_t>(data, "data", 1);
  return std::make_shared<PackedWeight>(
      attach(std::move(parts), floats(bias), bytes.data, bytes.last(), std::make_shared<In>(data)));
}

// A view of a weight's memory that keeps the weight alive.
template <typename T> nb::ndarray<nb::numpy, const T> seen(const T* data, size_t size, nb::handle weight) {
  return nb::ndarray<nb::numpy, const T>(data, {size}, weight);
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
      })
      .def_prop_ro("parts", &described)
      .def_prop_ro("data", [](nb::handle self) {
        const auto& w = nb::cast<const PackedWeight&>(self);
        return seen(w.parts[0].codes, static_cast<size_t>(w.bytes), self);
      })
      .def_prop_ro("bias", [](nb::handle self) {
        const auto& w = nb::cast<const PackedWeight&>(self);
        return seen(w.bias.data(), w.bias.size(), self);
      });
  module.def("pack", &pack_parts, nb::arg("parts"), nb::arg("bf16"), nb::arg("bias").none(),
             nb::arg("threads") = 1);
  module.def("attach", &attach_parts, nb::arg("parts"), nb::arg("data"), nb::arg("bias").none());
  module.attr("PACKED_VERSION") = kPackedVersion;
}

}  // namespace octavo
