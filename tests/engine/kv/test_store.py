"""Rows, blocks and pages of K/V: each is where its index says, in every layer and for every head."""

from __future__ import annotations

import mmap

import torch

from edged.engine.kv.store import KvStore, KvStores, LayerHeads, kv_per_token, store_of

PAGES, SIZE, LAYERS, HEADS, WIDTH = 5, 4, 3, 2, 8


def numbered() -> KvStore:
    """Every key is the number of its place, every value the number beneath zero."""
    kv = KvStore(PAGES, SIZE, LAYERS, HEADS, WIDTH, torch.float32, torch.device("cpu"))
    assert not kv.keys.any()
    assert not kv.values.any()
    kv.keys.copy_(torch.arange(1, kv.keys.numel() + 1).view_as(kv.keys))
    kv.values.copy_(-kv.keys)
    return kv


def by_place(store: torch.Tensor) -> torch.Tensor:
    return store.view(LAYERS, PAGES, HEADS, SIZE, WIDTH)


def test_a_page_is_a_block_for_each_head_in_each_layer() -> None:
    kv = numbered()
    assert kv.page_bytes == 2 * LAYERS * HEADS * SIZE * WIDTH * 4
    rows = kv.row_index(torch.tensor([3, 1]), torch.tensor([2, 0]))
    for layer in range(LAYERS):
        for store, found in zip((kv.keys, kv.values), kv.rows(layer), strict=True):
            wanted = torch.stack([by_place(store)[layer, 3, :, 2], by_place(store)[layer, 1, :, 0]])
            assert torch.equal(found[rows].view(2, HEADS, WIDTH), wanted)
    tables = torch.tensor([[4, 0], [2, 3]])
    for layer in range(LAYERS):
        for store, found in zip((kv.keys, kv.values), kv.read(layer, kv.block_index(tables), 2), strict=True):
            wanted = by_place(store)[layer, tables].transpose(1, 2).reshape(2, HEADS, 2 * SIZE, WIDTH)
            assert torch.equal(found, wanted)
        keys = kv.read_keys(layer, torch.tensor([[4 * HEADS, 0], [3, 3 * HEADS]]))
        blocks = kv.keys[layer]
        assert torch.equal(keys, torch.stack([torch.cat([blocks[8], blocks[0]]), torch.cat([blocks[3], blocks[6]])]))


def test_what_is_written_stands_in_one_layer_and_is_finite() -> None:
    kv = numbered()
    before = kv.keys.clone()
    new = torch.full((1, HEADS, WIDTH), 7.0)
    new[0, 1, :2] = torch.tensor([float("nan"), float("inf")])
    kv.write(1, kv.row_index(torch.tensor([2]), torch.tensor([3])), new, -new)
    wanted = new.nan_to_num()
    assert torch.equal(by_place(kv.keys)[1, 2, :, 3], wanted[0])
    assert torch.equal(by_place(kv.values)[1, 2, :, 3], (-new).nan_to_num()[0])
    changed = (kv.keys != before).view(LAYERS, PAGES, HEADS, SIZE, WIDTH).any(-1)
    assert changed.nonzero().tolist() == [[1, 2, 0, 3], [1, 2, 1, 3]]


def test_rows_are_moved_within_a_layer_though_they_overlap() -> None:
    kv = numbered()
    before = [store.clone() for store in (kv.keys, kv.values)]
    rows = torch.arange(2, 12)
    kv.move(2, rows, rows - 2)
    for store, old in zip((kv.keys, kv.values), before, strict=True):
        assert torch.equal(store[:2], old[:2])
        moved, was = store[2].view(-1, WIDTH), old[2].view(-1, WIDTH)
        assert torch.equal(moved[:10], was[2:12])
        assert torch.equal(moved[10:], was[10:])


def test_pages_are_moved_in_all_layers() -> None:
    kv = numbered()
    before = [store.clone() for store in (kv.keys, kv.values)]
    kv.move_pages({4: 1, 3: 0})
    for store, old in zip((kv.keys, kv.values), before, strict=True):
        assert torch.equal(by_place(store)[:, [1, 0, 2, 3, 4]], by_place(old)[:, [4, 3, 2, 3, 4]])


def test_pages_that_are_given_back_are_zeros_and_the_others_stay() -> None:
    width = mmap.PAGESIZE // 4
    kv = KvStore(4, 1, 2, 1, width, torch.float32, torch.device("cpu"))
    for store in (kv.keys, kv.values):
        store.fill_(1.0)
    assert kv.gives_back
    kv.give_back(3)
    for store in (kv.keys, kv.values):
        assert store.amax(dim=(2, 3)).tolist() == [[1, 1, 1, 0]] * 2
    kv.reclaim(4)
    kv.give_back(1)
    for store in (kv.keys, kv.values):
        assert store.amax(dim=(2, 3)).tolist() == [[1, 0, 0, 0]] * 2


def test_layers_of_unlike_shapes_share_pages_and_readers_have_no_rows_of_their_own() -> None:
    width = mmap.PAGESIZE // 4
    layers = [LayerHeads(4, 2, width, 0), LayerHeads(4, 1, 2 * width, 1), LayerHeads(4, 2, width, 0)]
    kv = store_of(layers, 3, 1, torch.float32, torch.device("cpu"))
    assert isinstance(kv, KvStores)
    assert kv.page_bytes == kv_per_token(layers, torch.float32) == 2 * 4 * (2 * width + 2 * width)
    (first, own), (second, _), (read, of) = (kv.store_of_layer(layer) for layer in range(3))
    assert first is read
    assert own == of == 0
    assert first is not second
    places = torch.arange(3)
    for store in (first, second):
        for part in (store.keys, store.values):
            part.view(store.layers, 3, -1).copy_(places[:, None].expand(-1, store.kv_heads * store.head_dim))
    kv.move_pages({2: 0})
    kv.give_back(2)
    kv.reclaim(3)
    for store in (first, second):
        for part in (store.keys, store.values):
            assert part.view(store.layers, 3, -1).amax(-1).tolist() == [[2, 1, 0]]
    assert isinstance(store_of(layers[:1], 3, 1, torch.float32, torch.device("cpu")), KvStore)
