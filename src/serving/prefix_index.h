#pragma once
// Which pages hold which tokens. A node is a page of tokens behind those of its parent, so a path
// from the root is a prefix; it knows the page of every group, as far as the index still holds it.
// Nodes are found by a hash of the parent's hash and the tokens, and taken only if parent and
// tokens are equal: a hash alone is never trusted.

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "serving/page_group.h"

namespace gyre {

using PrefixHash = uint64_t (*)(uint64_t parent, std::span<const int32_t> tokens);
uint64_t prefix_hash(uint64_t parent, std::span<const int32_t> tokens);

class PrefixIndex {
 public:
  // `geometry` is the root's hash: pages of another pool are others. `hash` is for tests.
  PrefixIndex(uint64_t page_tokens, size_t groups, uint64_t geometry,
              PrefixHash hash = prefix_hash);

  uint64_t size() const { return size_; }
  // The child of `parent` (kNoNode: the root) with these tokens, page_tokens of them; or kNoNode.
  uint32_t find(uint32_t parent, std::span<const int32_t> tokens) const;
  uint32_t insert(uint32_t parent, std::span<const int32_t> tokens);

  PageId page(uint32_t node, size_t group) const { return pages_[node * groups_ + group]; }
  void set_page(uint32_t node, size_t group, PageId page) { pages_[node * groups_ + group] = page; }
  uint32_t parent(uint32_t node) const { return nodes_[node].parent; }
  std::span<const int32_t> tokens(uint32_t node) const {
    return std::span(tokens_).subspan(node * page_tokens_, page_tokens_);
  }
  size_t max_nodes() const { return nodes_.size(); }  // numbers are below
  uint32_t first_root() const { return root_; }
  // A sibling that has the same page of a group, or kNoNode.
  uint32_t sibling_with(uint32_t node, size_t group) const;
  bool is_leaf(uint32_t node) const { return nodes_[node].child == kNoNode; }
  bool is_empty(uint32_t node) const;        // no group's page is left
  uint32_t first_leaf(uint32_t node) const;  // the deepest first descendant, or itself
  // A leaf. Its pages are the caller's to let go of.
  void erase(uint32_t node);

  // visit(node); `parent` kNoNode: the nodes without a parent
  template <class Visit>
  void for_children(uint32_t parent, const Visit& visit) const {
    uint32_t node = parent == kNoNode ? root_ : nodes_[parent].child;
    for (; node != kNoNode; node = nodes_[node].next) visit(node);
  }
  // Parents before children. visit(node)
  template <class Visit>
  void for_each(const Visit& visit) const {
    std::vector<uint32_t> open;
    for_children(kNoNode, [&](uint32_t node) { open.push_back(node); });
    while (!open.empty()) {
      const uint32_t node = open.back();
      open.pop_back();
      visit(node);
      for_children(node, [&](uint32_t child) { open.push_back(child); });
    }
  }

 private:
  struct Node {
    uint64_t hash = 0;
    uint32_t parent = kNoNode;
    uint32_t child = kNoNode;                     // the first
    uint32_t next = kNoNode, previous = kNoNode;  // siblings
    uint32_t same_hash = kNoNode;
  };

  uint64_t hash_of(uint32_t parent, std::span<const int32_t> tokens) const {
    return hash_(parent == kNoNode ? geometry_ : nodes_[parent].hash, tokens);
  }

  uint64_t page_tokens_;
  size_t groups_;
  uint64_t geometry_;
  PrefixHash hash_;
  std::vector<Node> nodes_;
  std::vector<PageId> pages_;    // [node][group]
  std::vector<int32_t> tokens_;  // [node][page_tokens]
  std::vector<uint32_t> unused_;
  std::unordered_map<uint64_t, uint32_t> by_hash_;  // the first of each hash
  uint32_t root_ = kNoNode;                         // the first node without a parent
  uint64_t size_ = 0;
};

}  // namespace gyre
