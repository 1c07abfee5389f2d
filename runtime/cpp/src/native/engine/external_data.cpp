#include "native/engine/external_data.hpp"

#include <cstddef>
#include <cstdint>
#include <stdexcept>

namespace specrt::native {

namespace {

// Messages of onnx.proto that tensors are in.
enum class Kind {
  kNone,
  kModel,
  kGraph,
  kNode,
  kAttribute,
  kTensor,
  kSparse,
  kFunction,
  kTraining
};

struct Child {
  Kind parent;
  std::uint64_t field;
  Kind kind;
};

constexpr Child kChildren[] = {
    {Kind::kModel, 7, Kind::kGraph},       {Kind::kModel, 20, Kind::kTraining},
    {Kind::kModel, 25, Kind::kFunction},   {Kind::kTraining, 1, Kind::kGraph},
    {Kind::kTraining, 2, Kind::kGraph},    {Kind::kGraph, 1, Kind::kNode},
    {Kind::kGraph, 5, Kind::kTensor},      {Kind::kGraph, 15, Kind::kSparse},
    {Kind::kFunction, 7, Kind::kNode},     {Kind::kFunction, 11, Kind::kAttribute},
    {Kind::kNode, 5, Kind::kAttribute},    {Kind::kAttribute, 5, Kind::kTensor},
    {Kind::kAttribute, 6, Kind::kGraph},   {Kind::kAttribute, 10, Kind::kTensor},
    {Kind::kAttribute, 11, Kind::kGraph},  {Kind::kAttribute, 22, Kind::kSparse},
    {Kind::kAttribute, 23, Kind::kSparse}, {Kind::kSparse, 1, Kind::kTensor},
    {Kind::kSparse, 2, Kind::kTensor}};

constexpr std::uint64_t kExternalData = 13;  // of a tensor: pairs of a key and a value
constexpr std::uint64_t kDataLocation = 14;  // 1: external
constexpr int kDeepest = 100;                // as deep as protobuf itself reads

Kind child_of(Kind parent, std::uint64_t field) {
  for (const Child& child : kChildren)
    if (child.parent == parent && child.field == field) return child.kind;
  return Kind::kNone;
}

struct Field {
  std::uint64_t number = 0;
  std::uint64_t value = 0;  // of a whole number
  std::string_view bytes;   // of what has a length
};

// The fields of a message in protobuf's wire format, one after another.
class Message {
 public:
  explicit Message(std::string_view bytes) : left_(bytes) {}

  bool next(Field& field) {
    if (left_.empty()) return false;
    const std::uint64_t tag = varint();
    field = {tag >> 3, 0, {}};
    switch (tag & 7) {
      case 0:
        field.value = varint();
        return true;
      case 1:
        take(8);
        return true;
      case 2:
        field.bytes = take(varint());
        return true;
      case 5:
        take(4);
        return true;
      default:
        throw std::runtime_error("it is not ONNX model");
    }
  }

 private:
  std::string_view take(std::uint64_t count) {
    if (count > left_.size()) throw std::runtime_error("it is not ONNX model, or cut off");
    const std::string_view taken = left_.substr(0, count);
    left_.remove_prefix(count);
    return taken;
  }

  std::uint64_t varint() {
    std::uint64_t value = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
      const auto byte = static_cast<unsigned char>(take(1)[0]);
      value |= std::uint64_t{byte & 0x7FU} << shift;
      if (byte < 0x80) return value;
    }
    throw std::runtime_error("it is not ONNX model");
  }

  std::string_view left_;
};

void read_tensor(std::string_view bytes, std::set<std::string>& locations) {
  Message tensor(bytes);
  bool is_external = false;
  std::string location;
  for (Field field; tensor.next(field);) {
    if (field.number == kDataLocation) is_external = field.value == 1;
    if (field.number != kExternalData) continue;
    Message pair(field.bytes);
    std::string_view key, value;
    for (Field part; pair.next(part);) (part.number == 1 ? key : value) = part.bytes;
    if (key == "location") location = value;
  }
  if (is_external) locations.insert(location);
}

void read(Kind kind, std::string_view bytes, int depth, std::set<std::string>& locations) {
  if (depth > kDeepest) throw std::runtime_error("it is nested too deeply");
  if (kind == Kind::kTensor) return read_tensor(bytes, locations);
  Message message(bytes);
  for (Field field; message.next(field);) {
    const Kind child = child_of(kind, field.number);
    if (child != Kind::kNone) read(child, field.bytes, depth + 1, locations);
  }
}

}  // namespace

std::set<std::string> external_data(std::string_view model) {
  std::set<std::string> locations;
  read(Kind::kModel, model, 0, locations);
  return locations;
}

}  // namespace specrt::native
