"""One user's adapter: its fp32 master weights and optimizer, and its versions on disk in PEFT's format.

On disk: `<root>/<adapter>/v000012/` with `adapter_config.json` and `adapter_model.safetensors` (PEFT's own, loadable by
PEFT and TRL, and by vLLM where it is LoRA), `optimizer.safetensors` and `edged.json` (the manifest with checksums,
written last).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from edged.align.adapters.form import AdapterForm, LoraLeaves, LoraSpec, RowNorms, master_gradients, measured, served
from edged.align.adapters.peft_import import CONFIG, WEIGHTS, ImportRefused, form_of
from edged.runtime.durable import sync
from edged.settings.live import Live
from edged.settings.load import AlignSettings, Settings
from edged.store.data_dir import erase_folder, path_in, sha256_of
from edged.tensors.host_copy import HostCopies

MANIFEST, OPTIMIZER = "edged.json", "optimizer.safetensors"
MAX_GRAD_NORM = 1.0
"""L2 norm to which gradients are clipped."""
_DRAFT = ".draft"


class UnknownAdapter(KeyError):
    """An adapter of that name does not exist."""


class AdapterError(ValueError):
    """Files of an adapter that cannot be used; the message names the folder and the reason."""


class GradientTooLarge(ValueError):
    """A step's gradient norm is far above those of the adapter's earlier steps; the message gives the norm."""


class AdapterState:
    """An adapter's current version: weights in fp32, of the linears that its form has, and AdamW over them.

    All of them lie in one tensor, so that an optimizer step is a few operations whatever the number of linears.
    """

    def __init__(
        self,
        name: str,
        form: AdapterForm,
        settings: Live[Settings],
        device: torch.device,
        begin: bool = True,
        row_norms: RowNorms | None = None,
    ) -> None:
        """Read `settings` anew at each step, so that changes apply to the next one. Not to `begin`, but to restore
        weights next, leaves version 0 zero. Only a DoRA form needs `row_norms`."""
        self.name, self.form, self.settings, self.device = name, form, settings, device
        self._row_norms = row_norms
        self._norms: dict[str, torch.Tensor] | None = None
        self.version = self.newest_number = 0
        """`newest_number` is the highest version number ever assigned."""
        self._shapes = list(form.shapes.values())
        self._flat = torch.zeros(sum(map(math.prod, self._shapes)), device=device, requires_grad=True)
        parts = [part.requires_grad_(True) for part in self._split(self._flat.detach())]
        self.weights = form.by_linear(parts)
        if begin:
            self._initialize()
        self._new_optimizer()

    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of a tensor of all weights, in the order of `parameters`."""
        parts = flat.split([math.prod(shape) for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    @torch.no_grad()
    def _initialize(self) -> None:
        """Set version 0's weights, which answer as the base: A uniform as PEFT's Kaiming initialization, B zero."""
        seed = int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:6], "big")
        generator = torch.Generator().manual_seed(seed)
        for a, _ in self.weights.values():
            bound = a.shape[1] ** -0.5
            a.copy_(torch.empty(a.shape).uniform_(-bound, bound, generator=generator))

    @property
    def finite(self) -> bool:
        """Whether all weights are finite."""
        return bool(self._flat.isfinite().all())

    @property
    def norms(self) -> Mapping[str, torch.Tensor]:
        """Norms of the rows of W + sBA, of each linear with a magnitude; computed once for each version."""
        if self._norms is None:
            self._norms = measured(self.weights, self.form.scalings, self._row_norms)
        return self._norms

    @property
    @torch.no_grad()
    def served(self) -> LoraLeaves:
        """The weights as slots and steps have them: see `form.served`."""
        return served(self.weights, self.norms)

    @torch.no_grad()
    def master_gradients(self, gradients: LoraLeaves) -> LoraLeaves:
        """Return the weights' gradients from those of what is served, as `form.master_gradients`."""
        return master_gradients(gradients, self.weights, self.norms)

    def parameters(self) -> list[torch.Tensor]:
        """All weights, in the form's order."""
        return [tensor for own in self.weights.values() for tensor in own]

    def _new_optimizer(self) -> None:
        self._optimizer = torch.optim.AdamW([self._flat], weight_decay=0.0, fused=True)

    def step(
        self,
        gradients: Mapping[str, tuple[torch.Tensor, ...]],
        count: int,
        weight: float | None = None,
        max_norm: float = math.inf,
        scale: float = 1.0,
        align: AlignSettings | None = None,
    ) -> float:
        """Clip the gradient, take AdamW's step and begin the next version. Returns the mean's L2 norm before clipping.

        `gradients` are sums, divided by `count`. `weight` is the sum of the pairs' weights, by default `count`; `scale`
        multiplies the step size; `align` are the step's settings, by default those in force. Raises FloatingPointError
        when the norm is not finite, GradientTooLarge when it is over `max_norm`, and whatever AdamW raises; nothing
        has changed then.
        """
        align, group = align or self.settings.current.align, self._optimizer.param_groups[0]
        try:
            sums = [gradient.flatten() for name in self.weights for gradient in gradients[name]]
            self._flat.grad = torch.cat(sums).div_(count)
            # In fp32 a norm of norms is more exact than one of all numbers.
            total = torch.nn.utils.get_total_norm(self._split(self._flat.grad))
            torch.nn.utils.clip_grads_with_norm_([self._flat], MAX_GRAD_NORM, total)
            norm = float(total)
            if not math.isfinite(norm):
                raise FloatingPointError(f"gradient norm is {norm}")
            if norm > max_norm:
                raise GradientTooLarge(f"gradient: its norm is {norm:.3g}, {max_norm:.3g} is far for this adapter")
            # AdamW moves as far for one pair as for many, and for light ones as for heavy ones: without this, pairs
            # that trickle in would move the weights micro_batch_pairs times as far as the same pairs that come at
            # once, and a step of weak signals as far as one of choices.
            share = min(1.0, (count if weight is None else weight) / align.micro_batch_pairs)
            group["lr"] = align.learning_rate * share * scale
            self._whole_optimizer_step()
        finally:
            self._optimizer.zero_grad(set_to_none=True)
        self._norms = None
        self.version = self.newest_number = max(self.version, self.newest_number) + 1
        return norm

    def _whole_optimizer_step(self) -> None:
        """Take AdamW's step wholly or not at all: one operation changes weights and moments, and only the first step
        takes memory, for the moments."""
        state = self._optimizer.state.get(self._flat)
        steps = state["step"].clone() if state else None
        try:
            self._optimizer.step()
        except Exception:
            if state is None or steps is None:
                self._new_optimizer()
            else:
                state["step"].copy_(steps)
            raise

    @property
    def steps_taken(self) -> int:
        """Number of AdamW's steps since it was made anew: it is a part of the moments, on disk as in memory."""
        state: Mapping[str, torch.Tensor] = next(iter(self._optimizer.state.values()), {})
        return int(state["step"]) if state else 0

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights by PEFT's names, copied to the host."""
        return HostCopies(self._peft_weights()).on_host()

    def copied(self) -> CopiedVersion:
        """A copy of the current version, on the device that it is on."""
        moments = {
            f"{index}.{key}": part
            for key, value in self._optimizer.state.get(self._flat, {}).items()
            for index, part in enumerate(self._split(value) if value.dim() else [value] * len(self._shapes))
        }
        weights, optimizer = HostCopies(self._peft_weights()), HostCopies(moments)
        return CopiedVersion(self.name, self.version, weights, optimizer, self.form)

    def _peft_weights(self) -> dict[str, torch.Tensor]:
        return dict(zip(self.form.shapes, self.parameters(), strict=True))

    def restore(
        self, tensors: Mapping[str, torch.Tensor], version: int, moments: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Load weights (by PEFT's names) as `version`, and AdamW's state in `Snapshot`'s form, else a new one.

        Raises AdapterError on a mismatch.
        """
        state = self._flat_moments(moments) if moments else None
        with torch.no_grad():
            for name, leaf in self._peft_weights().items():
                value = tensors.get(name)
                if value is None or value.shape != leaf.shape:
                    found = "missing" if value is None else f"of shape {tuple(value.shape)}"
                    needed = f"{tuple(leaf.shape)} is needed (another rank or other target_modules?)"
                    raise AdapterError(f'adapter "{self.name}": {name} is {found}, {needed}')
                leaf.copy_(value)
        # Not when they are first asked for: a version is restored on another thread than the engine's.
        self._norms = measured(self.weights, self.form.scalings, self._row_norms)
        self.version, self.newest_number = version, max(version, self.newest_number)
        self._new_optimizer()
        if state is not None:
            self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": {0: state}})

    def _flat_moments(self, moments: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return AdamW's state from `Snapshot`'s form. Raises AdapterError where a part is missing."""
        parts = range(len(self._shapes))
        try:
            # A copy: AdamW counts in place.
            state = {"step": moments["0.step"].clone()}
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.cat([moments[f"{index}.{key}"].flatten() for index in parts])
        except KeyError as error:
            raise AdapterError(f'adapter "{self.name}": {error.args[0]} of its optimizer is missing') from None
        return state


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A version on the host, ready to be written by any thread."""

    adapter: str
    version: int
    weights: dict[str, torch.Tensor]
    """Weights by PEFT's names."""
    optimizer: dict[str, torch.Tensor]
    """AdamW's moments and step counts: "<index of the parameter>.<name>"."""
    form: AdapterForm


@dataclass(frozen=True, slots=True)
class CopiedVersion:
    """A version that no later step changes; `snapshot` may be called on any thread."""

    adapter: str
    version: int
    weights: HostCopies
    optimizer: HostCopies
    form: AdapterForm

    def snapshot(self) -> Snapshot:
        """The version, copied to the host."""
        return Snapshot(self.adapter, self.version, self.weights.on_host(), self.optimizer.on_host(), self.form)


class AdapterFiles:
    """The adapter versions on disk under `root`."""

    def __init__(self, root: Path, spec: LoraSpec, keep: int) -> None:
        self.root, self.spec, self.keep = root, spec, keep
        self._hidden: list[str] = []
        self._protected: dict[str, tuple[int, ...]] = {}
        self.left: set[str] = set()
        """Forgotten adapters whose files, here or of another base, could not be removed; nothing new is saved."""
        root.mkdir(parents=True, exist_ok=True)
        # Synced files are lost with their folder where the folder's own entry is not synced.
        for folder in (root.parent, root.parent.parent):
            sync(folder)
        # A draft is a version that a power cut left half written.
        for draft in root.glob(f"*/.v*{_DRAFT}"):
            shutil.rmtree(draft, ignore_errors=True)

    def save(self, snapshot: Snapshot) -> tuple[Path, tuple[int, ...]]:
        """Write a version atomically; returns its folder and the versions removed by retention."""
        folder = path_in(self.root, snapshot.adapter)
        folder.mkdir(exist_ok=True)
        final = self.path(snapshot.adapter, snapshot.version)
        draft = folder / f".{final.name}{_DRAFT}"
        shutil.rmtree(draft, ignore_errors=True)
        try:
            draft.mkdir()
            self._write(draft, snapshot)
            shutil.rmtree(final, ignore_errors=True)
            os.rename(draft, final)
        except BaseException:
            # Half a version would take room on a full disk.
            shutil.rmtree(draft, ignore_errors=True)
            raise
        sync(folder)
        sync(self.root)
        return final, self._retire(snapshot.adapter)

    def _write(self, draft: Path, snapshot: Snapshot) -> None:
        (draft / CONFIG).write_text(json.dumps(self._peft_config(snapshot.form), indent=1), "utf-8")
        save_file(snapshot.weights, draft / WEIGHTS, metadata={"format": "pt"})
        save_file(snapshot.optimizer, draft / OPTIMIZER)
        sums = {path.name: sha256_of(path) for path in sorted(draft.iterdir())}
        manifest = {
            "adapter": snapshot.adapter,
            "version": snapshot.version,
            "base_model": self.spec.base_model,
            "base_fingerprint": self.spec.fingerprint,
            "sha256": sums,
            "form": dict(snapshot.form.config) if snapshot.form.imported else None,
        }
        (draft / MANIFEST).write_text(json.dumps(manifest, indent=1), "utf-8")
        for path in draft.iterdir():
            sync(path)
        sync(draft)

    def protect(self, adapter: str, *versions: int) -> None:
        """Exempt these versions of an adapter from retention, in place of those exempt before."""
        self._protected[adapter] = versions

    def _retire(self, adapter: str) -> tuple[int, ...]:
        protected = self._protected.get(adapter, ())
        old = [version for version in self.versions(adapter)[: -self.keep] if version not in protected]
        for version in old:
            shutil.rmtree(self.path(adapter, version), ignore_errors=True)
        return tuple(old)

    def path(self, adapter: str, version: int) -> Path:
        """The folder of an adapter's version."""
        return path_in(self.root, adapter, f"v{version:06d}")

    def adapters(self) -> list[str]:
        """Names of adapters with at least one version."""
        return sorted(p.name for p in self.root.iterdir() if p.is_dir() and self.versions(p.name))

    def versions(self, adapter: str) -> list[int]:
        """Versions that have a folder, oldest first; they may be damaged."""
        folder = path_in(self.root, adapter)
        if self.hidden(adapter) or not folder.is_dir():
            return []
        return sorted(int(p.name[1:]) for p in folder.glob("v[0-9]*") if p.is_dir())

    def check(self, adapter: str, version: int) -> Path:
        """Verify that a version's files are whole and fit the base model; returns its folder. Raises AdapterError."""
        folder = self.path(adapter, version)
        if self.hidden(adapter):
            raise AdapterError(f"{folder}: the adapter was forgotten")
        self._check_files(folder)
        return folder

    def _check_files(self, folder: Path) -> dict[str, Any]:
        """Verify that a folder's files are a whole version that fits the base model; returns its manifest."""
        try:
            manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text("utf-8"))
            sums = manifest["sha256"]
            damaged = [name for name, value in sums.items() if sha256_of(folder / name) != value]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise AdapterError(f"{folder}: not a whole adapter version ({error})") from None
        if damaged:
            raise AdapterError(f"{folder}: {', '.join(damaged)} is damaged (checksum differs)")
        if manifest.get("base_fingerprint") != self.spec.fingerprint:
            which = f'"{manifest.get("base_model")}", not "{self.spec.base_model}" as it is now'
            raise AdapterError(f"{folder}: learned on another base model ({which})")
        self._form(folder, manifest)
        return manifest

    def received(self, folder: Path) -> Snapshot:
        """Read the version in a folder of files that another node sent. Raises AdapterError."""
        manifest = self._check_files(folder)
        try:
            return self._read(folder, str(manifest["adapter"]), int(manifest["version"]))
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise AdapterError(f"{folder}: could not be read ({error})") from None

    def has(self, adapter: str, version: int, folder: Path) -> bool:
        """Whether a version on disk has the very weights of the one in a folder that another node sent."""
        manifests = [path / MANIFEST for path in (self.path(adapter, version), folder)]
        if not manifests[0].exists():
            return False
        mine, theirs = (json.loads(path.read_text("utf-8"))["sha256"].get(WEIGHTS) for path in manifests)
        return bool(mine == theirs)

    def _form(self, folder: Path, manifest: Mapping[str, Any]) -> AdapterForm:
        """The form of the version in a folder: that of the settings, or the one it was imported with. Raises
        AdapterError where the settings do not admit it."""
        with safe_open(folder / WEIGHTS, "pt") as file:
            found = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 (not a dict)
        if config := manifest.get("form"):
            try:
                return form_of(config, found, self.spec)
            except ImportRefused as error:
                raise AdapterError(f"{folder}: imported under other settings: {error}") from None
        form = self.spec.form
        alpha = json.loads((folder / CONFIG).read_text("utf-8"))["lora_alpha"]
        if found != form.shapes or alpha != self.spec.alpha:
            way_out = "restore those settings to serve it; with these its pairs are learned anew"
            what = "another align.rank, align.alpha or align.target_modules"
            raise AdapterError(f"{folder}: learned with {what}: {way_out}")
        return form

    def load(self, adapter: str, version: int) -> Snapshot:
        """Check a version and read it. Raises AdapterError, also where it is removed meanwhile."""
        folder = self.check(adapter, version)
        try:
            return self.read(adapter, version)
        except (OSError, SafetensorError) as error:
            raise AdapterError(f"{folder}: could not be read ({error})") from None

    def read(self, adapter: str, version: int) -> Snapshot:
        """Read a version that was checked before."""
        return self._read(self.path(adapter, version), adapter, version)

    def _read(self, folder: Path, adapter: str, version: int) -> Snapshot:
        weights, optimizer = (load_file(folder / name) for name in (WEIGHTS, OPTIMIZER))
        form = self._form(folder, json.loads((folder / MANIFEST).read_text("utf-8")))
        return Snapshot(adapter, version, weights, optimizer, form)

    def newest(self, adapter: str) -> tuple[int, list[str]]:
        """The newest undamaged version (0: none), and the problems of newer ones."""
        problems: list[str] = []
        for version in reversed(self.versions(adapter)):
            try:
                self.check(adapter, version)
                return version, problems
            except AdapterError as error:
                problems.append(str(error))
        return 0, problems

    def hide(self, adapter: str) -> None:
        """Hide an adapter's versions from look-ups until `forget` has removed them; may be called on any thread."""
        self._hidden.append(adapter)
        self._protected.pop(adapter, None)

    def hidden(self, adapter: str) -> bool:
        """Whether an adapter's versions are about to be removed, or could not be."""
        return adapter in self._hidden or adapter in self.left

    def forget(self, adapter: str) -> None:
        """Remove all versions of a hidden adapter. Raises OSError; the adapter stays hidden then."""
        try:
            erase_folder(path_in(self.root, adapter))
        except OSError:
            self.left.add(adapter)
            raise
        finally:
            self._hidden.remove(adapter)

    def _peft_config(self, form: AdapterForm) -> dict[str, object]:
        return {
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.spec.base_source or self.spec.base_model,
            "inference_mode": True,
            "fan_in_fan_out": False,
            **form.config,
        }
