#include "serving/prefix_index.h"

#include <algorithm>

#include "cache/snapshot.h"

namespace gyre {

uint64_t prefix_hash(uint64_t parent, std::span<const int32_t> tokens) {
  // Two rounds, so that nothing is copied: the parent's hash goes through the checksum as well.
  const uint64_t parts[] = {parent, checksum_of(std::as_bytes(tokens))};
  return checksum_of(std::as_bytes(std::span(parts)));
}

PrefixIndex::PrefixIndex(uint64_t page_tokens, size_t groups, uint64_t geometry, PrefixHash hash)
    : page_tokens_(page_tokens), groups_(groups), geometry_(geometry), hash_(hash) {}

uint32_t PrefixIndex::find(uint32_t parent, std::span<const int32_t> tokens) const {
  const auto found = by_hash_.find(hash_of(parent, tokens));
  if (found == by_hash_.end()) return kNoNode;
  uint32_t node = found->second;
  while (node != kNoNode &&
         (nodes_[node].parent != parent || !std::ranges::equal(this->tokens(node), tokens))) {
    node = nodes_[node].same_hash;
  }
  return node;
}

uint32_t PrefixIndex::insert(uint32_t parent, std::span<const int32_t> tokens) {
  if (unused_.empty()) {
    const size_t count = nodes_.size() + 1;
    if (unused_.capacity() < count) unused_.reserve(2 * count);  // erase() must not fail
    pages_.resize(count * groups_, kNoPage);
    tokens_.resize(count * page_tokens_);
    nodes_.emplace_back();
    unused_.push_back(static_cast<uint32_t>(count - 1));
  }
  const uint32_t node = unused_.back();
  const uint64_t hash = hash_of(parent, tokens);
  uint32_t& first_same = by_hash_.try_emplace(hash, kNoNode).first->second;
  unused_.pop_back();
  uint32_t& first = parent == kNoNode ? root_ : nodes_[parent].child;
  nodes_[node] = {hash, parent, kNoNode, first, kNoNode, first_same};
  if (first != kNoNode) nodes_[first].previous = node;
  first = first_same = node;
  std::ranges::copy(tokens, tokens_.begin() + static_cast<ptrdiff_t>(node * page_tokens_));
  ++size_;
  return node;
}

bool PrefixIndex::is_empty(uint32_t node) const {
  const auto pages = std::span(pages_).subspan(node * groups_, groups_);
  return std::ranges::all_of(pages, [](PageId page) { return page == kNoPage; });
}

uint32_t PrefixIndex::sibling_with(uint32_t node, size_t group) const {
  const uint32_t parent = nodes_[node].parent;
  uint32_t other = parent == kNoNode ? root_ : nodes_[parent].child;
  while (other != kNoNode && (other == node || page(other, group) != page(node, group)))
    other = nodes_[other].next;
  return other;
}

uint32_t PrefixIndex::first_leaf(uint32_t node) const {
  while (nodes_[node].child != kNoNode) node = nodes_[node].child;
  return node;
}

void PrefixIndex::erase(uint32_t node) {
  const Node gone = nodes_[node];
  if (gone.next != kNoNode) nodes_[gone.next].previous = gone.previous;
  uint32_t& before = gone.previous != kNoNode ? nodes_[gone.previous].next
                     : gone.parent != kNoNode ? nodes_[gone.parent].child
                                              : root_;
  before = gone.next;
  const auto found = by_hash_.find(gone.hash);
  uint32_t* same = &found->second;
  while (*same != node) same = &nodes_[*same].same_hash;
  *same = gone.same_hash;
  if (found->second == kNoNode) by_hash_.erase(found);
  for (size_t group = 0; group < groups_; ++group) set_page(node, group, kNoPage);
  unused_.push_back(node);
  --size_;
}

}  // namespace gyre
