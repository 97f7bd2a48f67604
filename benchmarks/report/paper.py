"""Numbers of the MACE paper, each with the section, figure or table that it comes from.

Nothing here is measured, and nothing else in the report is written by hand.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PaperNumber:
    """A number of the paper: its value, the paper's wording, and its place."""

    value: float
    text: str
    source: str

    def __str__(self) -> str:
        return f"{self.text} ({self.source})"


PERIODIC_WIN_RATE = PaperNumber(1.19, "up to 1.19x without retraining", "3.1, Figure 2, RLHF")
CONTINUOUS_WIN_RATE = PaperNumber(1.24, "1.24x without retraining", "3.1, Figure 2, RLHF")
PERIODIC_CLPD = PaperNumber(2.47, "2.47x without retraining", "3.1, Figure 2, RLHF")
CONTINUOUS_CLPD = PaperNumber(3.17, "3.17x without retraining", "3.1, Figure 2, RLHF")

PERIODIC_BUSY = PaperNumber(0.178, "17.8 %; on AGX Orin 82.7 %", "3.2, Figure 5")
CONTINUOUS_BUSY = PaperNumber(0.211, "21.1 %; on AGX Orin 80.6 %", "3.2, Figure 5")
HYBRID_BUSY = PaperNumber(0.277, "27.7 %; on AGX Orin 85.2 %", "3.2, Figure 5")
BREAKDOWN_TTFT = PaperNumber(0.86, "0.62x to 0.86x of periodic; on AGX Orin 0.92x to 0.98x", "3.2, Figure 5")
BREAKDOWN_TBT = PaperNumber(0.85, "0.59x to 0.85x of periodic; on AGX Orin about 1.01x", "3.2, Figure 5")
BREAKDOWN_FINETUNE = PaperNumber(0.86, "0.68x to 0.86x of periodic; on AGX Orin 0.97x to 0.98x", "3.2, Figure 5")

PREFIX_RATIO = PaperNumber(0.0, "a distribution, no number", "4.3, Figure 8a")
PRUNED_TBT = PaperNumber(0.0, "decoding is faster with a smaller C_total, no number", "4.3, Figure 8b")

WIN_RATE_TO_ADAINF = PaperNumber(1.02, "up to 1.02x of AdaInf's", "6.2, Figure 9, RLHF")
CLPD_TO_ADAINF = PaperNumber(1.34, "up to 1.34x of AdaInf's", "6.2, Figure 9, RLHF")
THROUGHPUT_TO_ADAINF = PaperNumber(1.46, "up to 1.46x of AdaInf's at 10 % on A6000", "6.2, Figure 10a")
THROUGHPUT_TO_ADAINF_ORIN = PaperNumber(1.12, "1.12x of AdaInf's on average on AGX Orin", "6.2, Figure 10b")
TTFT_BELOW_ADAINF = PaperNumber(0.63, "63 % below AdaInf's on A6000", "6.2, Figure 11a")
TBT_BELOW_ADAINF = PaperNumber(0.30, "30 % below AdaInf's on AGX Orin", "6.2, Figure 11b")

BIN_ATTAINMENT = PaperNumber(0.20, "MACE/Bin falls below 20 % at high load", "6.3, Figure 12")
PREFIX_ATTAINMENT = PaperNumber(0.35, "MACE/Prefix 35 to 40 % below MACE at 150 requests/s", "6.3, Figure 12")
PREFIX_CLPD = PaperNumber(1.08, "MACE up to 8 % over MACE/Prefix", "6.3, Figure 12")
BIN_CLPD = PaperNumber(1.15, "MACE up to 15 % over MACE/Bin", "6.3, Figure 12")
PRUNE_CLPD = PaperNumber(0.0, "MACE/Prune has the highest CLPD", "6.3, Figure 12")
PRUNE_THROUGHPUT = PaperNumber(0.07, "MACE/Prune 7 to 11 % below MACE", "6.3, Figure 12")
PREFIX_THROUGHPUT = PaperNumber(0.07, "MACE/Prefix 7 to 11 % below MACE", "6.3, Figure 12")
BIN_THROUGHPUT = PaperNumber(0.176, "MACE/Bin 17.6 % below MACE's 225 tokens/s", "6.3, Figure 12")
PRIORITY_PAIRS = PaperNumber(0.0, "no number: of MACE without priorities only the overhead is told", "6.3, Table 1")

ITERATIONS = PaperNumber(0.0, "hybrid needs fewer iterations, each about as long", "6.3, Figure 13")
SCHEDULER_LATENCY_MS = {
    "ekya": PaperNumber(0.03, "0.03 ms", "6.3, Table 1"),
    "adainf": PaperNumber(0.08, "0.08 ms", "6.3, Table 1"),
    "mace": PaperNumber(0.15, "about 5x Ekya's 0.03 ms", "6.3"),
    "mace-bin": PaperNumber(0.12, "0.12 ms", "6.3, Table 1, IB"),
    "mace-priority": PaperNumber(0.11, "0.11 ms", "6.3, Table 1, PA"),
}
"""Scheduler latency by policy. Table 1 shows MACE only without one of its parts, and no policy that is missing here."""
SCHEDULER_MEMORY_MB = {
    "ekya": PaperNumber(0.6, "0.6 MB", "6.3, Table 1"),
    "adainf": PaperNumber(2.0, "2 MB", "6.3, Table 1"),
    "mace": PaperNumber(5.0, "under 5 MB", "6.3"),
    "mace-bin": PaperNumber(4.5, "4.5 MB", "6.3, Table 1, IB"),
    "mace-priority": PaperNumber(3.5, "3.5 MB", "6.3, Table 1, PA"),
}
