"""Makes pairs of sentences and a tokenizer of them: `output/wmt14.en_fr.txt`, `output/wmt14.fr_en.txt`, `output/tokenizer.json`.

    python preprocess.py                                           test-full/newstest2014-fren-ref.{en,fr}.sgm, as WMT14 has them
    python preprocess.py --source corpus.en --target corpus.fr     two files, a sentence a line
    python preprocess.py --pairs corpus.txt                        one file, a pair a line with a tab between
    python preprocess.py --numerals 4000                           English numerals and German ones, which need no file

Pairs with an empty side are left out. The tokenizer is byte-pair encoding, by the library `tokenizers`.
"""

from __future__ import annotations

import argparse
import html
import random
import re
import sys
from pathlib import Path

from dataset import SPECIAL_TOKENS, read_pairs
from numerals import english, german

from ttp.errors import DatasetError, TTPError

WMT14 = "newstest2014-fren-ref"
Pairs = list[tuple[str, str]]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--wmt14", type=Path, default=Path("test-full"), help="the folder of WMT14's test sets (%(default)s)"
    )
    parser.add_argument("--source", type=Path, help="a sentence a line; with --target")
    parser.add_argument("--target", type=Path, help="its translation, in the same line")
    parser.add_argument("--pairs", type=Path, help="a pair a line: source, tab, target")
    parser.add_argument("--numerals", type=int, metavar="COUNT", help="so many numbers of 0 to 9999, spelled out")
    parser.add_argument("--vocab_size", type=int, default=20000, help="tokens at most (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("output"), help="the folder to write (%(default)s)")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    try:
        pairs = pairs_of(args)
        write(pairs, args.output, args.vocab_size)
    except TTPError as error:
        print(f"preprocess.py: {error}", file=sys.stderr)
        return 2
    return 0


def pairs_of(args: argparse.Namespace) -> Pairs:
    """Return the pairs that the arguments name, each side in one line without tabs. Raises DatasetError."""
    given = [name for name in ("pairs", "source", "numerals") if getattr(args, name) is not None]
    if len(given) > 1 or (args.source is None) != (args.target is None):
        raise DatasetError(
            "arguments: expected --source with --target, or --pairs, or --numerals, or none of them. Correct them"
        )
    if args.pairs:
        return read_pairs(args.pairs)
    if args.numerals is not None:
        if not 1 <= args.numerals <= 10_000:
            raise DatasetError(f"--numerals: got {args.numerals}, expected 1 to 10000. Correct it")
        return [(english(n), german(n)) for n in random.Random(0).sample(range(10_000), args.numerals)]
    if args.source:
        return aligned(args.source, _lines(args.source), args.target, _lines(args.target))
    files = [args.wmt14 / f"{WMT14}.{language}.sgm" for language in ("en", "fr")]
    for file in files:
        if not file.is_file():
            raise DatasetError(
                f"{file}: got no such file, expected WMT14's. Unpack test-full.tgz here, or name its folder with --wmt14, or use --source,"
                " --pairs or --numerals"
            )
    return aligned(files[0], segments(files[0]), files[1], segments(files[1]))


def aligned(source: Path, sources: list[str], target: Path, targets: list[str]) -> Pairs:
    """Return the pairs of two files; those with an empty side are left out. Raises DatasetError."""
    if len(sources) != len(targets):
        raise DatasetError(
            f"{source} has {len(sources)} sentences, {target} has {len(targets)}: expected as many. Align the files"
        )
    sides = [[" ".join(sentence.split()) for sentence in side] for side in (sources, targets)]
    pairs = [(a, b) for a, b in zip(*sides, strict=True) if a and b]
    if not pairs:
        raise DatasetError(f"{source} and {target}: got no pair, expected one or more. Name other files")
    return pairs


def segments(path: Path) -> list[str]:
    """Return the sentences of an .sgm file, in order."""
    text = "\n".join(_lines(path))
    return [html.unescape(found) for found in re.findall(r"<seg\b[^>]*>(.*?)</seg>", text, re.DOTALL | re.IGNORECASE)]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(
            f"{path}: got a file that cannot be read ({error}), expected UTF-8 text. Correct the path"
        ) from None


def write(pairs: Pairs, output: Path, vocab_size: int) -> None:
    """Write both directions, and a tokenizer of both languages."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    if vocab_size < 256 + len(SPECIAL_TOKENS):
        raise DatasetError(
            f"--vocab_size: got {vocab_size}, expected {256 + len(SPECIAL_TOKENS)} or more, for all bytes. Raise it"
        )
    output.mkdir(parents=True, exist_ok=True)
    for name, turned in (("wmt14.en_fr.txt", False), ("wmt14.fr_en.txt", True)):
        lines = [f"{b}\t{a}\n" if turned else f"{a}\t{b}\n" for a, b in pairs]
        (output / name).write_text("".join(lines), encoding="utf-8")
        print(f"write {output / name} file finished!\n total count = {len(pairs)}")
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL_TOKENS[3]))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SPECIAL_TOKENS[token] for token in sorted(SPECIAL_TOKENS)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((side for pair in pairs for side in pair), trainer)
    tokenizer.save(str(output / "tokenizer.json"))
    print(f"write {output / 'tokenizer.json'} file finished!\n tokens = {tokenizer.get_vocab_size()}")


if __name__ == "__main__":
    sys.exit(main())
