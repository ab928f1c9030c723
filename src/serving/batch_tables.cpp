#include "serving/batch_tables.h"

#include <algorithm>
#include <limits>

#include "runtime/require.h"

namespace gyre {
namespace {

using Members = std::span<const StepPages::Member>;

constexpr int32_t kUnknown = std::numeric_limits<int32_t>::min();  // no value that is ever sent
constexpr int32_t kNoSlot = -1;
constexpr uint64_t kMaxWords = uint64_t{1} << 31;

}  // namespace

// Puts words into one area and remembers the run from the first to the last that differ.
class BatchTables::Writer {
 public:
  Writer(BatchTables& tables, const Area& area)
      : words_(tables.words_.data() + area.at), area_(area), runs_(tables.runs_) {}
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;
  ~Writer() {
    if (first_ < end_) runs_.push_back({area_.at + first_, end_ - first_});  // reserved
  }
  void put(uint64_t at, uint64_t value) { put(at, static_cast<int32_t>(value)); }
  void put(uint64_t at, int32_t value) {
    if (words_[at] == value) return;
    words_[at] = value;
    first_ = std::min(first_, at);
    end_ = std::max(end_, at + 1);
  }

 private:
  int32_t* words_;
  Area area_;
  std::vector<WordRun>& runs_;
  uint64_t first_ = ~uint64_t{0}, end_ = 0;
};

BatchTables::Area BatchTables::reserve(uint64_t count) {
  const Area area{words_.size(), count};
  require(count < kMaxWords && area.at < kMaxWords - count, "kv_batch: the tables of a step ",
          "need more than 2^31 words; lower max_sequences, max_tokens or max_kv_length");
  words_.resize(area.at + count);
  return area;
}

BatchTables::BatchTables(const KvPoolState& pool, const BatchBounds& bounds)
    : page_tokens_(pool.options.page_tokens), bounds_(bounds), areas_(pool.groups.size()) {
  cu_seqlens_q_area_ = reserve(bounds.sequences + 1);
  kv_lengths_area_ = reserve(bounds.sequences);
  positions_area_ = reserve(bounds.tokens);
  for (size_t i = 0; i < areas_.size(); ++i) {
    GroupAreas& areas = areas_[i];
    keys_.push_back(pool.groups[i].keys());
    areas.width = std::max<uint64_t>(1, pool.groups[i].end_page(bounds.length));
    areas.table = reserve(bounds.sequences * areas.width);
    areas.slots = reserve(bounds.tokens);
    areas.tail_begin = reserve(keys_[i].f16 && keys_[i].window != 0 ? bounds.sequences : 0);
    areas.from = reserve(bounds.sequences);
    areas.to = reserve(bounds.sequences);
    areas.rows.resize(bounds.sequences);
    std::fill_n(words_.begin() + static_cast<ptrdiff_t>(areas.slots.at), bounds.tokens, kNoSlot);
  }
  constexpr uint64_t kRunsPerGroup = 4, kOtherRuns = 3;
  runs_.reserve(kOtherRuns + areas_.size() * (kRunsPerGroup + bounds.sequences));
  prompt_runs_.reserve(1);
  prompt_words_.resize((bounds.sequences + sizeof(int32_t) - 1) / sizeof(int32_t));
  block_ = pool.device.tensor(DType::i32, {words_.size()});
  block_.write_from(std::span<const int32_t>(words_));
  prompt_block_ = pool.device.tensor(DType::u8, {prompt_words_.size() * sizeof(int32_t)});
  is_prefill_ = prompt_block_.slice(0, 0, bounds.sequences);
  cu_seqlens_q_ = view(cu_seqlens_q_area_);
  kv_lengths_ = view(kv_lengths_area_);
  positions_ = view(positions_area_);
  for (const GroupAreas& areas : areas_) {
    groups_.push_back({view(areas.table).reshape({bounds.sequences, areas.width}),
                       view(areas.slots), view(areas.tail_begin), view(areas.from),
                       view(areas.to)});
  }
}

void BatchTables::forget() {
  std::ranges::fill(words_, kUnknown);
  std::ranges::fill(prompt_words_, kUnknown);
  for (GroupAreas& areas : areas_) std::ranges::fill(areas.rows, Row{});
  used_sequences_ = bounds_.sequences;
  used_tokens_ = bounds_.tokens;
}

void BatchTables::put_sequences(Members members) {
  Writer begin(*this, cu_seqlens_q_area_), kv_lengths(*this, kv_lengths_area_),
      positions(*this, positions_area_);
  uint64_t token = 0;
  for (uint64_t row = 0; row < members.size(); ++row) {
    const StepPages::Member& member = members[row];
    begin.put(row, token);
    kv_lengths.put(row, member.start + member.tokens);
    for (uint64_t i = 0; i < member.tokens; ++i) positions.put(token++, member.start + i);
  }
  // Rows of no sequence have no queries: their ranges are empty.
  for (uint64_t row = members.size(); row <= bounds_.sequences; ++row) begin.put(row, token);
  for (uint64_t row = members.size(); row < used_sequences_; ++row)
    kv_lengths.put(row, uint64_t{0});
}

void BatchTables::put_prompts(Members members) {
  prompt_runs_.clear();
  bool differs = false;
  for (uint64_t word = 0; word < prompt_words_.size(); ++word) {
    uint32_t value = 0;
    for (uint64_t i = 0; i < sizeof(int32_t); ++i) {
      const uint64_t row = word * sizeof(int32_t) + i;
      if (row < members.size() && members[row].is_prefill) value |= 1u << (8 * i);
    }
    differs = differs || prompt_words_[word] != static_cast<int32_t>(value);
    prompt_words_[word] = static_cast<int32_t>(value);
  }
  if (differs) prompt_runs_.push_back({0, prompt_words_.size()});
}

void BatchTables::put_row(GroupAreas& areas, size_t row, const KvSequenceState& sequence,
                          size_t group) {
  const KvSequenceState::Pages& pages = sequence.groups[group];
  Row& has = areas.rows[row];
  uint64_t from = 0;
  if (has.sequence == sequence.number) {
    if (has.epoch == pages.epoch) from = has.end;
    if (has.epoch + 1 == pages.epoch) from = std::min(has.end, pages.kept);
  }
  const uint64_t end = pages.end();
  has = {sequence.number, pages.epoch, end};
  if (from >= end) return;
  Writer table(*this, {areas.table.at + row * areas.width, areas.width});
  for (uint64_t page = std::max(from, pages.first); page < end; ++page)
    table.put(page, pages.at(page));
}

void BatchTables::put_group(size_t index, Members members) {
  GroupAreas& areas = areas_[index];
  const GroupKeys& keys = keys_[index];
  const uint64_t limit = keys.limit != 0 ? keys.limit : ~uint64_t{0};
  Writer slots(*this, areas.slots), tail_begin(*this, areas.tail_begin);
  uint64_t token = 0;
  for (uint64_t row = 0; row < members.size(); ++row) {
    const StepPages::Member& member = members[row];
    const KvSequenceState& sequence = *member.sequence;
    put_row(areas, row, sequence, index);
    if (areas.tail_begin.size != 0) tail_begin.put(row, sequence.oldest(index));
    const uint64_t writes =
        limit < member.start ? 0 : std::min(limit - member.start, member.tokens);
    uint64_t page = member.page, place = member.place;
    for (uint64_t i = 0; i < writes; ++i) {
      slots.put(token++,
                static_cast<uint64_t>(sequence.groups[index].at(page)) * page_tokens_ + place);
      if (++place == page_tokens_) ++page, place = 0;
    }
    for (uint64_t i = writes; i < member.tokens; ++i) slots.put(token++, kNoSlot);
  }
  while (token < used_tokens_) slots.put(token++, kNoSlot);
}

void BatchTables::put_copies(std::span<const PageCopy> copies) {
  if (copies.empty()) return;
  for (size_t group = 0; group < areas_.size(); ++group) {
    Writer from(*this, areas_[group].from), to(*this, areas_[group].to);
    uint64_t count = 0;
    for (const PageCopy& copy : copies) {
      if (copy.group != group) continue;
      from.put(count, copy.from);
      to.put(count++, copy.to);
    }
  }
}

void BatchTables::send(Encoder& encoder, Members members, std::span<const PageCopy> copies) {
  runs_.clear();
  put_sequences(members);
  put_prompts(members);
  for (size_t i = 0; i < areas_.size(); ++i) put_group(i, members);
  put_copies(copies);
  used_sequences_ = members.size();
  used_tokens_ = 0;
  for (const StepPages::Member& member : members) used_tokens_ += member.tokens;
  words_write(encoder, words_, runs_, block_);
  words_write(encoder, prompt_words_, prompt_runs_, prompt_block_);
}

}  // namespace gyre
