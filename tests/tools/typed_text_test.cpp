// What people type: counts, lists, formats, and names with mistakes in them.
#include "count.h"
#include "did_you_mean.h"
#include "expect_error.h"
#include "format_pair.h"

namespace gyre::test {
namespace {

using bench::did_you_mean;
using bench::edit_distance;
using bench::format_pair;
using tools::parse_count;
using tools::parse_list;
using tools::parse_seconds;

TEST(Count, TakesKAndM) {
  EXPECT_EQ(parse_count("1"), 1u);
  EXPECT_EQ(parse_count("4096"), 4096u);
  EXPECT_EQ(parse_count("32k"), 32768u);
  EXPECT_EQ(parse_count("128K"), 131072u);
  EXPECT_EQ(parse_count("1M"), 1048576u);
  EXPECT_EQ(parse_count("2147483647"), 2147483647u);
  EXPECT_EQ(parse_count("2047M"), 2047u << 20);
  EXPECT_EQ(parse_count("0", {0, 8}), 0u);
}

TEST(Count, RefusesWithTheTextAsTyped) {
  for (const char* text : {"",
                           "-5",
                           "-1k",
                           "+5",
                           "0",
                           "0k",
                           "abc",
                           "k",
                           "M",
                           "12x",
                           "1.5k",
                           "1kk",
                           "1m",
                           " 1",
                           "1 ",
                           "0x10",
                           "1e3",
                           "2147483648",
                           "2048M",
                           "99999999999999",
                           "18446744073709551616",
                           "18014398509481984k",
                           "17592186044416M"}) {
    EXPECT_REFUSED(("from 1 to 2147483647", "got \"" + std::string(text) + "\""), parse_count(text))
        << text;
  }
  EXPECT_REFUSED(("from 0 to 8, got \"9\""), parse_count("9", {0, 8}));
  EXPECT_REFUSED(("from 3 to 8, got \"2\""), parse_count("2", {3, 8}));
}

TEST(Seconds, AreFromAMillisecondToAMinute) {
  EXPECT_EQ(parse_seconds("0.25"), 0.25);
  EXPECT_EQ(parse_seconds("0.001"), 0.001);
  EXPECT_EQ(parse_seconds("60"), 60);
  for (const char* text : {"", "0", "-1", "60.5", "nan", "inf", "1s", "one"}) {
    EXPECT_REFUSED(("seconds", "got \"" + std::string(text) + "\""), parse_seconds(text)) << text;
  }
}

TEST(List, HasNoGaps) {
  EXPECT_EQ(parse_list("1k"), std::vector<std::string>{"1k"});
  EXPECT_EQ(parse_list("a,b,c"), (std::vector<std::string>{"a", "b", "c"}));
  for (const char* text : {"", ",", "a,", ",a", "a,,b"}) {
    EXPECT_REFUSED(("list", "got \"" + std::string(text) + "\""), parse_list(text)) << text;
  }
}

TEST(Format, IsOneNameOrTwo) {
  for (const KvFormat k : kv_formats()) {
    for (const KvFormat v : kv_formats()) {
      const bench::FormatPair pair{k, v};
      EXPECT_EQ(format_pair(pair.label()), pair) << pair.label();
    }
  }
  EXPECT_EQ(format_pair("tq8/tq8"), (bench::FormatPair{KvFormat::tq8, KvFormat::tq8}));
  EXPECT_REFUSED(("\"tq88\"", "did you mean tq8?", "There are f32, f16"), format_pair("tq88"));
  for (const char* text : {"", "/", "tq8/", "/tq4", "tq8/tq4/tq2", "tq8 ", "int8"})
    EXPECT_REFUSED(("no cache format"), format_pair(text)) << text;
}

TEST(EditDistance, CountsEdits) {
  EXPECT_EQ(edit_distance("", ""), 0u);
  EXPECT_EQ(edit_distance("", "abc"), 3u);
  EXPECT_EQ(edit_distance("abc", ""), 3u);
  EXPECT_EQ(edit_distance("attention", "attention"), 0u);
  EXPECT_EQ(edit_distance("atention", "attention"), 1u);
  EXPECT_EQ(edit_distance("attentionn", "attention"), 1u);
  EXPECT_EQ(edit_distance("attentiom", "attention"), 1u);
  EXPECT_EQ(edit_distance("comapre", "compare"), 1u);  // neighbours changed places
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3u);
  EXPECT_EQ(edit_distance("Llama-3.1-8B", "llama-3.1-8b"), 0u);
  EXPECT_EQ(edit_distance("ab", "ba"), 1u);
  EXPECT_EQ(edit_distance("abc", "cab"), 2u);
}

TEST(DidYouMean, SaysWhatIsNear) {
  const std::vector<std::string> names = {"compare", "devices", "bench", "tq4", "tq5"};
  EXPECT_EQ(did_you_mean("comapre", names), "; did you mean compare?");
  EXPECT_EQ(did_you_mean("dev", names), "");
  EXPECT_EQ(did_you_mean("device", names), "; did you mean devices?");
  EXPECT_EQ(did_you_mean("tq7", names), "; did you mean tq4 or tq5?");
  EXPECT_EQ(did_you_mean("", names), "");
  EXPECT_EQ(did_you_mean("xyzzy", names), "");
  EXPECT_EQ(did_you_mean(std::string(100000, 'c'), names), "");
  EXPECT_EQ(did_you_mean("bench", {}), "");
}

TEST(DidYouMean, RefusalsNameAll) {
  const std::vector<std::string> names = {"one", "three"};
  EXPECT_REFUSED(("no number \"thre\"; did you mean three? There are one, three"),
                 bench::refuse_name("no number", "thre", names));
  EXPECT_REFUSED(("no number \"nine million\"; there are one, three"),
                 bench::refuse_name("no number", "nine million", names));
}

}  // namespace
}  // namespace gyre::test
