"""The table of LoRA slots and the adapter versions in them."""

from collections import OrderedDict

from edged.align.adapters.adapter import AdapterState
from edged.engine.lora.linear import LoraSlots
from edged.engine.lora.segments import NO_SLOT


class SlotTable:
    """The slots, held by running sequences and fine-tune steps; idle ones keep their version until it is replaced."""

    def __init__(self, lora: LoraSlots) -> None:
        self._lora = lora
        self._holders = [0] * lora.slots
        self._where: dict[tuple[str, int], int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict((slot, None) for slot in range(lora.slots))

    @property
    def count(self) -> int:
        """Number of slots, held or idle."""
        return len(self._holders)

    @property
    def idle(self) -> int:
        """Number of slots without a holder."""
        return len(self._idle)

    def held(self, adapter: str, version: int) -> bool:
        """Whether a slot with this version has a holder, and so may be shared."""
        slot = self._where.get((adapter, version))
        return slot is not None and slot not in self._idle

    @property
    def adapters(self) -> int:
        """Number of adapter versions in slots."""
        return len(self._where)

    def acquire(self, state: AdapterState, reserve: int = 0) -> int | None:
        """Hold a slot with the state's current version until `release`; None if only `reserve` slots are idle.

        The untrained version 0 needs no slot: NO_SLOT.
        """
        if state.version == 0:
            return NO_SLOT
        key = (state.name, state.version)
        slot = self._where.get(key)
        if (slot is None or slot in self._idle) and len(self._idle) <= reserve:
            return None
        if slot is None:
            slot = next(iter(self._idle))
            self._put(slot, state)
        self._idle.pop(slot, None)
        self._holders[slot] += 1
        return slot

    def release(self, slot: int) -> None:
        """Release a slot that `acquire` returned."""
        if slot == NO_SLOT:
            return
        self._holders[slot] -= 1
        if self._holders[slot] == 0:
            self._idle[slot] = None

    def update(self, state: AdapterState, previous: int, hot: bool) -> int | None:
        """Replace version `previous` by the new one in its slot: if `hot`, also while sequences run on it.

        Returns that slot, or None if running sequences keep the version that they have.
        """
        slot = self._where.get((state.name, previous))
        if slot is None or not (hot or self._holders[slot] == 0):
            return None
        self._put(slot, state)
        return slot

    def _put(self, slot: int, state: AdapterState) -> None:
        self._lora.load(slot, state.served, state.form.scalings)
        self._where = {key: own for key, own in self._where.items() if own != slot}
        self._where[state.name, state.version] = slot

    def forget(self, adapter: str) -> None:
        """Forget an adapter's slots: running sequences keep them, others do not find them."""
        self._where = {key: slot for key, slot in self._where.items() if key[0] != adapter}
