#include <fmt/format.h>

#include <array>
#include <random>

#include "tools/bench/serve_load.h"
#include "tools/bench/suite.h"

namespace quern {
namespace {

constexpr std::array kCode = {
    "Write a Python class for a priority queue on a binary heap, with push, pop, peek and a change of "
    "priority, and tests.",
    "Write a C++ function that parses a CSV line with quoted fields, and explain the cases that it covers.",
    "Refactor this into small functions and add error handling: def load(p): import json; d = "
    "json.load(open(p)); return "
    "[x['name'].strip().lower() for x in d['items'] if x['on']]",
    "Write a SQL schema for a library with books, copies, readers and loans, and five queries that a "
    "librarian needs.",
};
constexpr std::array kMathematics = {
    "A tank fills through one pipe in 6 hours and through another in 4, and a leak empties it in 12. How "
    "long does it take "
    "with all three open? Show each step.",
    "Prove that the sum of the first n odd numbers is a square, in two different ways.",
    "Find all real solutions of x^4 - 5x^2 + 4 = 0 and sketch how the sign of the left side changes.",
    "Three dice are thrown. What is the probability that the highest shows exactly 5? Derive it and check it "
    "by counting.",
};
constexpr std::array kReasoning = {
    "Five houses stand in a row. The green one is left of the white one, the baker lives in the middle, the "
    "painter beside the "
    "green one, and the tailor not at an end. Who may live where? List every possibility.",
    "A train leaves at 9:00 and is delayed for a third of its journey's time; it arrives at 13:00. Which of "
    "the statements "
    "about its timetable can be true? Think of at least four and decide each.",
    "Somebody says: all my days are long unless it rains, and yesterday was short. What follows, and what "
    "does not?",
    "You have a balance and nine coins, of which one is lighter. Explain a way that needs two weighings, and "
    "why one is too few.",
};
constexpr std::array kProse = {
    "Write the first chapter of a story about a lighthouse keeper who finds a door in the sea.",
    "Describe a market at dawn so that a reader smells it. Use no colours.",
    "Write a letter from a clockmaker to the apprentice who left him ten years ago.",
    "Tell a fable about a miller, a raven and a stone that wanted to be a mountain.",
};
constexpr std::array kQuestions = {
    "Why is the sky blue at noon and red in the evening?",
    "What should I look at before I buy a used bicycle?",
    "Explain to a twelve-year-old how a vaccine works.",
    "What is the difference between weather and climate, and why do people mix them up?",
};
constexpr std::array kJson = {
    "Give ten European rivers as a JSON list of objects with name, length_km, countries and mouth. Only "
    "JSON.",
    "Write a JSON configuration for a web server with three sites, each with a host, a root, headers and "
    "redirects. Only JSON.",
    "Turn this into JSON with customer, items and total: two lamps at 14.50 and a table at 89 for Ines "
    "Marlow, paid by card.",
    "Write a JSON Schema for an address book with people, several addresses each, and phone numbers. Only "
    "JSON.",
};
constexpr std::array kKinds = {
    PromptKind{"code", kCode},   PromptKind{"mathematics", kMathematics}, PromptKind{"reasoning", kReasoning},
    PromptKind{"prose", kProse}, PromptKind{"questions", kQuestions},     PromptKind{"JSON", kJson},
};

}  // namespace

std::span<const PromptKind> prompt_kinds() { return kKinds; }

Hidden hidden_number(uint64_t seed, int64_t words) {
    std::mt19937_64 random(seed);
    const std::string number = fmt::format("{}", 100000 + random() % 900000);
    const auto before = static_cast<int64_t>(random() % static_cast<uint64_t>(std::max<int64_t>(words, 1)));
    std::string text = fmt::format(
        "Read this. {}. The number of the blue door is {}. {}. What is the number of the blue door? Answer "
        "with the number "
        "alone.",
        random_words(seed + 1, before), number, random_words(seed + 2, words - before));
    return {std::move(text), number};
}

}  // namespace quern
