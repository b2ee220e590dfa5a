"""Every drafting system that was looked at has a row, and every row a verdict."""

import re

import pytest

from tests.runs import ROOT

PAGE = (ROOT / "docs" / "drafting-systems.md").read_text(encoding="utf-8")
SYSTEMS = """
SPEC-RL; HistoSpec of RhymeRL; DAS; SRT; SuffixDecoding; Seer; BubbleSpec; Hierarchy Drafting; SAM Decoding
Prompt lookup
Token Recycling; ADED; Make Some Noise; LUD; Predictive sampling, coupled Jacobi
Hydra; Clover and Clover-2; Chimera; EAGLE-2; EAGLE-3; Medusa; Amphista; Falcon; CTC drafter
MTP heads of SkyRL, slime and NeMo-RL; Bebop; TLT; FastGRPO; verl-SpeCo
PARD; PPD; Hidden Transfer; VocabTrim; EfficientRollout
Kangaroo; SWIFT; DEL
SparseSpec; SpecPV; RAPID; SpecKV and SpecPC
PEARL; Mirror-SD; EasySpec; SpecActor; Dovetail
SpecTr; Towards Optimal MDSD; Recursive SD; DySpec; RASD
Speculative sampling; Block verification; Judge Decoding; AutoJudge; Training-free judge by KL
Semantic Reflective Verification; Arbitrage; Reward-guided SD; Entropy Adaptive Decoding
SmartSpec; SpecDec++; SVIP; Batch Speculative Decoding Done Right; SpecMemo
FastDraft; Direct Alignment, TVD++; Online Speculative Decoding; AdaSPEC; S2D; Scaling laws, Scylla
MSD; FLASH; HiViS; SPEC benchmark for VLMs; Speculative Jacobi Decoding; LANTERN; Continuous Speculative Decoding
STRIDE; CarelessWhisper; DraftRec; PV-RNN; Collaborative inference by resource-aware parallel SD; Probe Sampling
Grammar-Aligned Decoding; JSONSchemaBench; Adaptive weighted rejection sampling
Diverse Beam Search; Cautious Next Token Prediction; A*-Decoding; PG-TD; ICN
Align3 and SpecBench; WQRM; Hyperfitting; Greedy decoding for extractive QA; Multi-Prompting Decoder
What learning algorithm is in-context learning?; Markov Categorical Framework
Decoding Visual Experience; Scene text network; Discrete Key-Value Bottleneck
"""
VERDICTS = ("**here**", "**measured**", "**not for exact rollouts**")


def names(cell):
    """Systems of a first column: they are parted by `;`, and what is in brackets is no name."""
    return [name.strip() for name in re.sub(r"\([^()]*\)", "", cell).split(";")]


def rows(page):
    """(first column, verdict) of every row about systems."""
    tables = re.findall(r"^\| system \| verdict \|\n\|---\|---\|\n((?:\|.*\n)+)", page, re.MULTILINE)
    cells = [line.strip("| ").split(" | ") for table in tables for line in table.splitlines()]
    return [(first, " | ".join(rest)) for first, *rest in cells]


def wrong(page):
    """Systems that are missing, unknown or there twice, and rows whose verdict says too little."""
    there = [name for first, _ in rows(page) for name in names(first)]
    wanted = [name for line in SYSTEMS.strip().splitlines() for name in names(line)]
    found = [*set(wanted) - set(there), *set(there) - set(wanted), *(n for n in {*there} if there.count(n) > 1)]
    return sorted(found + [first for first, verdict in rows(page) if not says(verdict)])


def says(verdict):
    """Whether it begins with one of the verdicts, and names a file or an option, a file of figures, or a reason."""
    kind = next((kind for kind in VERDICTS if verdict.startswith(kind)), None)
    proof = {"**here**": r"`[^`]+`", "**measured**": r"\d.*\]\(\.\./benchmarks/"}.get(kind, r"\*\*: \w+ .{15}")
    return kind is not None and re.search(proof, verdict) is not None


def test_every_system_has_its_verdict():
    assert len(rows(PAGE)) > 60
    assert wrong(PAGE) == []


@pytest.mark.parametrize(
    ("there", "instead", "named"),
    [
        ("| PARD (", "| PARDON (", ["PARD", "PARDON"]),
        ("; HiViS;", ";", ["HiViS"]),
        ("; HiViS;", "; HiViS; DAS;", ["DAS"]),
        ("| Kangaroo (2404.18911) | **measured**: ", "| Kangaroo (2404.18911) | open: ", ["Kangaroo (2404.18911)"]),
        ("**here**: `trainer.drafter.objective=tvd` (`trainers/cotraining/distil.py`)", "**here**: somewhere", None),
    ],
)
def test_planted_faults_are_found(there, instead, named):
    assert there in PAGE
    found = wrong(PAGE.replace(there, instead, 1))
    assert found == (named or ["Direct Alignment, TVD++ (2403.00858)"])


def test_identifiers_are_of_arxiv():
    cells = [cell for first, _ in rows(PAGE) for cell in re.findall(r"\(([\d., ]+)\)", first)]
    assert len(cells) > 45
    assert [cell for cell in cells if not re.fullmatch(r"\d{4}\.\d{5}(, \d{4}\.\d{5})*", cell)] == []
