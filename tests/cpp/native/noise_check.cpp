#include "native/check.hpp"
#include "native/numbers.hpp"

namespace specrt::checks {

int check_noise(const native::Json& vectors) {
  int wrong = 0;
  for (const native::Json& vector : vectors.at("numbers").items()) {
    const native::Noise noise = noise_of(vector);
    const auto purpose = static_cast<native::Purpose>(vector.at("purpose").integer());
    const std::uint64_t position = whole_of(vector.at("position"));
    const Token token = vector.at("token").integer();
    const std::string what = "position " + std::to_string(position);
    wrong +=
        close(what, noise.exponential(purpose, position, token), vector.at("exponential").number());
    const double uniform = vector.at("uniform").number();
    wrong += close(what, noise.stream(purpose, position).uniform(token), uniform);
    if (token == 0 && noise.uniform(purpose, position) != uniform) {
      wrong += differs(what, shown(noise.uniform(purpose, position)), shown(uniform));
    }
  }
  return wrong;
}

static const Registered kRegistered("noise", check_noise);

}  // namespace specrt::checks
