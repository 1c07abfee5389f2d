// Parameters of every kind, good and bad.
#include <cmath>
#include <cstdint>
#include <limits>

#include "abi/check.hpp"

namespace {

class Made {
 public:
  Made() { GIVES(SPECRT_OK, specrt_params_create(&params)); }
  ~Made() { specrt_params_close(params); }
  Made(const Made&) = delete;
  Made& operator=(const Made&) = delete;

  specrt_status text(const char* name, const std::string& value) {
    return specrt_params_set_text(params, name, value.data(), value.size());
  }
  specrt_status add(const char* name, const std::string& value) {
    return specrt_params_add_text(params, name, value.data(), value.size());
  }
  specrt_status integer(const char* name, std::int64_t value) {
    return specrt_params_set_integer(params, name, value);
  }
  specrt_status number(const char* name, double value) {
    return specrt_params_set_number(params, name, value);
  }
  // Whether a generation takes them together.
  specrt_status used() {
    check::Opened opened;
    return check::generate(opened.session(), "count 1", nullptr, nullptr, params);
  }

  specrt_params* params = nullptr;
};

struct Range {
  const char* name;
  std::int64_t good;
  std::int64_t bad;
  const char* said;
};

}  // namespace

CHECK_CASE(integers) {
  Made made;
  const Range ranges[] = {
      {"max_tokens", 1, 0, "max_tokens is 0; expected a whole number of 1 or more"},
      {"top_k", -1, -2, "top_k is -2; expected a whole number of 1 or more, or 0 for all"},
      {"no_repeat_ngram_size", 0, -1, "expected a whole number of 0 or more"},
      {"min_tokens", 0, -1, "expected a whole number of 0 or more"},
      {"logprobs", 20, 21, "expected a whole number from 0 to 20"},
      {"prompt_logprobs", 0, -1, "expected a whole number from 0 to 20"},
      {"gamma", -1, -2, "gamma is -2; expected a whole number of 0 or more, or -1 for auto"},
      {"gamma", 0, std::int64_t{1} << 31, "expected a whole number of 0 or more"},
      {"ignore_eos", 1, 2, "ignore_eos is 2; expected 0 or 1"}};
  for (const Range& range : ranges) {
    GIVES(SPECRT_OK, made.integer(range.name, range.good));
    GIVES(SPECRT_INVALID_ARGUMENT, made.integer(range.name, range.bad));
    SAYS(range.said);
  }
  GIVES(SPECRT_OK, made.integer("seed", std::numeric_limits<std::int64_t>::min()));
  GIVES(SPECRT_OK, made.integer("seed", std::numeric_limits<std::int64_t>::max()));
  GIVES(SPECRT_OK, made.integer("max_tokens", std::numeric_limits<std::int64_t>::max()));
  GIVES(SPECRT_OK, made.integer("temperature", 1));
  GIVES(SPECRT_INVALID_ARGUMENT, made.integer("top_p", 2));
  SAYS("top_p is 2.0; expected a number above 0, up to 1");
  GIVES(SPECRT_OK, made.used());
}

CHECK_CASE(numbers) {
  Made made;
  const double nan = std::nan(""), infinity = std::numeric_limits<double>::infinity();
  const struct {
    const char* name;
    double good;
    double bad;
  } ranges[] = {{"temperature", 0.0, -0.1},
                {"top_p", 1.0, 0.0},
                {"top_p", 1e-300, 1.0000001},
                {"min_p", 0.0, -0.1},
                {"min_p", 1.0, 1.1},
                {"typical_p", 0.5, 0.0},
                {"repetition_penalty", 0.01, 0.0},
                {"repetition_penalty", 100.0, 100.1},
                {"presence_penalty", -2.0, 2.1},
                {"frequency_penalty", 2.0, -2.1}};
  for (const auto& range : ranges) {
    GIVES(SPECRT_OK, made.number(range.name, range.good));
    GIVES(SPECRT_INVALID_ARGUMENT, made.number(range.name, range.bad));
    GIVES(SPECRT_INVALID_ARGUMENT, made.number(range.name, nan));
    SAYS("is nan; expected a number");
    GIVES(SPECRT_INVALID_ARGUMENT, made.number(range.name, infinity));
  }
  GIVES(SPECRT_INVALID_ARGUMENT, made.number("temperature", -0.1));
  SAYS("temperature is -0.1; expected a number of 0 or more");
}

CHECK_CASE(texts) {
  Made made;
  GIVES(SPECRT_OK, made.text("verifier", "rejection"));
  GIVES(SPECRT_INVALID_ARGUMENT, made.text("verifier", "reject"));
  SAYS("verifier is 'reject'; expected 'match' or 'rejection'");
  GIVES(SPECRT_OK, made.text("drafter", "ngram"));
  GIVES(SPECRT_INVALID_ARGUMENT, made.text("drafter", "modle"));
  SAYS("did you mean 'model'?");
  GIVES(SPECRT_OK, made.text("gamma", "auto"));
  GIVES(SPECRT_INVALID_ARGUMENT, made.text("gamma", "three"));
  GIVES(SPECRT_INVALID_ARGUMENT, made.text("regex", ""));
  GIVES(SPECRT_INVALID_ARGUMENT, made.text("regex", std::string(10'001, 'a')));
  SAYS("regex has 10001 characters; expected up to 10000");
  GIVES(SPECRT_OK, made.text("regex", std::string(10'000, 'a')));
  GIVES(SPECRT_INVALID_ARGUMENT, made.text("regex", "a\xC0\xAF"));
  SAYS("regex is not UTF-8 at byte 1");
  GIVES(SPECRT_INVALID_ARGUMENT, made.text("r\xFFgex", "a"));
  SAYS("name is not UTF-8");
  GIVES(SPECRT_OK, made.add("stop", "\xF0\x9F\x98\x80"));
  GIVES(SPECRT_OK, made.add("stop", std::string("a\0b", 3)));
  GIVES(SPECRT_INVALID_ARGUMENT, made.add("stop", ""));
  SAYS("stop holds an empty string; leave it out");
  for (const char* wrong :
       {"\xED\xA0\x80", "\xF4\x90\x80\x80", "\x80", "\xE2\x82", "\xE0\x80\x80"}) {
    GIVES(SPECRT_INVALID_ARGUMENT, made.add("bad_words", wrong));
  }
  GIVES(SPECRT_INVALID_ARGUMENT, made.add("choice", std::string(100'001, 'a')));
  GIVES(SPECRT_OK, made.used());
}

CHECK_CASE(tokens) {
  Made made;
  const std::int64_t good[] = {1, 2}, bad[] = {3, -1};
  GIVES(SPECRT_OK, specrt_params_add_tokens(made.params, "stop_token_ids", good, 2));
  GIVES(SPECRT_OK, specrt_params_add_tokens(made.params, "stop_token_ids", nullptr, 0));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_params_add_tokens(made.params, "stop_token_ids", bad, 2));
  SAYS("stop_token_ids holds -1");
  GIVES(SPECRT_INVALID_ARGUMENT,
        specrt_params_add_tokens(made.params, "allowed_token_ids", nullptr, 0));
  SAYS("nothing could come");
  GIVES(SPECRT_OK, specrt_params_add_tokens(made.params, "allowed_token_ids", good, 2));
  GIVES(SPECRT_OK, specrt_params_add_bias(made.params, 5, 10'000));
  GIVES(SPECRT_OK, specrt_params_add_bias(made.params, 5, -1));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_params_add_bias(made.params, -5, 1));
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_params_add_bias(made.params, 5, 10'001));
  SAYS("logit_bias holds 5: 10001.0");
  GIVES(SPECRT_INVALID_ARGUMENT, specrt_params_add_bias(made.params, 5, std::nan("")));
  GIVES(SPECRT_OK, made.used());
}

CHECK_CASE(names) {
  Made made;
  GIVES(SPECRT_INVALID_ARGUMENT, made.number("temprature", 1));
  SAYS("unknown option 'temprature'; did you mean 'temperature'?");
  GIVES(SPECRT_INVALID_ARGUMENT, made.integer("xyzzy", 1));
  SAYS("; known: allowed_token_ids, bad_words, choice");
  GIVES(SPECRT_INVALID_ARGUMENT, made.integer("", 1));
  GIVES(SPECRT_INVALID_ARGUMENT, made.integer(std::string(100'000, 'a').c_str(), 1));
  GIVES(SPECRT_INVALID_ARGUMENT, made.number("top_k", 5));
  SAYS("top_k is a whole number; set it with specrt_params_set_integer");
  GIVES(SPECRT_INVALID_ARGUMENT, made.text("stop", "a"));
  SAYS("specrt_params_add_text");
  GIVES(SPECRT_INVALID_ARGUMENT, made.add("regex", "a"));
  GIVES(SPECRT_INVALID_ARGUMENT, made.integer("stop_token_ids", 1));
  GIVES(SPECRT_INVALID_ARGUMENT, made.number("logit_bias", 1));
  SAYS("specrt_params_add_bias");
  GIVES(SPECRT_INVALID_ARGUMENT, made.text("temperature", "1"));
}

CHECK_CASE(combinations) {
  Made tokens;
  GIVES(SPECRT_OK, tokens.integer("max_tokens", 4));
  GIVES(SPECRT_OK, tokens.integer("min_tokens", 5));
  GIVES(SPECRT_INVALID_ARGUMENT, tokens.used());
  SAYS("min_tokens is 5; expected up to max_tokens, 4");
  GIVES(SPECRT_OK, tokens.integer("min_tokens", 4));
  GIVES(SPECRT_OK, tokens.used());
  Made structures;
  GIVES(SPECRT_OK, structures.text("regex", "a+"));
  GIVES(SPECRT_OK, structures.used());
  GIVES(SPECRT_OK, structures.integer("ignore_eos", 1));
  GIVES(SPECRT_INVALID_ARGUMENT, structures.used());
  SAYS("regex and ignore_eos were given");
  GIVES(SPECRT_OK, structures.add("choice", "a"));
  GIVES(SPECRT_INVALID_ARGUMENT, structures.used());
  SAYS("regex and choice were given; expected one of them");
}
