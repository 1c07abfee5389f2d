// Complete a prompt, and show the text as it comes.
//
//   complete engines/build/codelet "def area(width, height):"
#include <exception>
#include <iostream>
#include <specrt/specrt.hpp>

int main(int count, char** arguments) {
  if (count != 3) {
    std::cerr << "usage: complete BUNDLE PROMPT\n";
    return 2;
  }
  try {
    const specrt::Generator generator(arguments[1]);
    std::cerr << generator.info().notices;

    specrt::Params params;
    params.max_tokens(64).temperature(0).stop("\n\n\n");

    specrt::Session session = generator.session();
    for (const specrt::Chunk& chunk : session.stream(arguments[2], params)) {
      std::cout << chunk.text << std::flush;
    }
    std::cout << '\n';

    const specrt::Stats stats = session.stats();
    std::cerr << specrt::version() << ": " << stats.completion_tokens << " tokens, "
              << stats.tokens_per_round << " a round, " << stats.finish_reason << '\n';
  } catch (const std::exception& error) {  // no bundle, no tokenizer, a pass that failed
    std::cerr << error.what() << '\n';
    return 1;
  }
  return 0;
}
