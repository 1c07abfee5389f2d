// Answer questions, and keep a summary of the conversation, at the same time: two sessions on two
// threads over one bundle.
//
//   assistant engines/build/codelet "def area(width, height):" "def perimeter(width, height):"
#include <exception>
#include <future>
#include <iostream>
#include <specrt/specrt.hpp>
#include <string>

namespace {

// Stream an answer to standard output; the only thread that writes.
std::string answer(specrt::Session& session, const std::string& conversation) {
  specrt::Params params;
  params.max_tokens(48).stop("\n\n\n");
  for (const specrt::Chunk& chunk : session.stream(conversation, params)) {
    std::cout << chunk.text << std::flush;
  }
  return session.text();
}

// Summarise what was said before, unseen.
std::string summarise(specrt::Session& session, const std::string& conversation) {
  specrt::Params params;
  params.max_tokens(24).stop("\n");
  return "this" + session.generate(conversation + "\n\n# Summary: this", params);
}

void converse(const specrt::Generator& generator, int count, char** questions) {
  specrt::Session answers = generator.session();
  specrt::Session summaries = generator.session();
  std::string conversation;
  for (int i = 0; i < count; ++i) {
    conversation += questions[i];
    auto summary = std::async(std::launch::async, summarise, std::ref(summaries), conversation);
    std::cout << "> " << questions[i] << '\n';
    try {
      conversation += answer(answers, conversation) + "\n\n";
    } catch (...) {
      summaries.cancel();  // or leaving would wait for it
      throw;
    }
    std::cout << "\n[in short: " << summary.get() << "]\n";
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 3) {
    std::cerr << "usage: assistant BUNDLE QUESTION...\n";
    return 2;
  }
  try {
    specrt::Generator generator(arguments[1]);
    converse(generator, count - 2, arguments + 2);
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
  return 0;
}
