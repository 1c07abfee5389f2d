// native_calls FILE: makes the calls of a list; prints the answer of each as a line of JSON.
#include <fstream>
#include <iterator>
#include <map>

#include "failure.hpp"
#include "native/answers.hpp"

namespace specrt::checks {

static std::map<std::string, Function>& functions() {
  static std::map<std::string, Function> known;
  return known;
}

Registered::Registered(std::initializer_list<std::pair<const std::string, Function>> more) {
  functions().insert(more);
}

static void set(Params& params, const std::string& name, const Json& value) {
  if (value.kind() == Json::Kind::kInteger) return set_integer(params, name, value.integer());
  if (value.kind() == Json::Kind::kNumber) return set_number(params, name, value.number());
  if (value.kind() == Json::Kind::kText) return set_text(params, name, value.text());
  for (const Json& item : value.items()) {
    if (item.kind() == Json::Kind::kText) add_text(params, name, item.text());
    if (item.kind() == Json::Kind::kList)
      add_bias(params, item.items()[0].integer(), item.items()[1].number());
    if (item.kind() != Json::Kind::kInteger) continue;
    const Token token = item.integer();
    add_tokens(params, name, &token, 1);
  }
}

Params params_of(const Json& options) {
  Params params;
  for (const auto& [name, value] : options.fields()) set(params, name, value);
  return params;
}

static std::string answer(const Json& call) {
  try {
    return functions().at(call.at("call").text())(call);
  } catch (const Failure& failure) {
    return object(
        {{"status", json(failure.status())}, {"message", json(std::string(failure.what()))}});
  }
}

}  // namespace specrt::checks

int main(int count, char** arguments) {
  if (count != 2) return 2;
  std::ifstream file(arguments[1], std::ios::binary);
  const auto calls =
      specrt::native::Json::parse(std::string{std::istreambuf_iterator<char>(file), {}});
  for (const auto& call : calls.items()) std::printf("%s\n", specrt::checks::answer(call).c_str());
  return 0;
}
