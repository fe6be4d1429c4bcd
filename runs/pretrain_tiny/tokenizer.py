"""Makes the tokenizer of `tiny`: one token per byte, and common words of the environments' texts.

A word becomes a token if it is part of at least a quarter of an environment's episodes, such as the
words of its rules, or of the title of a page of the wiki maze. All other text is bytes, so that the
model can spell the words of letter_counting and reverse, and calculate digit by digit.

    python runs/pretrain_tiny/tokenizer.py FOLDER
"""

import random
import re
import sys
from collections import Counter
from collections.abc import Iterator

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from environments import make
from environments.base import DEMO_SEEDS, Env
from environments.plumbing.pages import bundled

# every text environment, also those that tiny is not pretrained on
ENVIRONMENTS = """letter_counting letter_counting:difficulty=2 reverse reverse_echo math_qa:level=1
    math_qa:level=3 tic_tac_toe gymnasium:id=Blackjack-v1 gymnasium:id=CartPole-v1,memory=false
    wikipedia_maze:n_hops=2,brief=true wikipedia_maze:n_hops=2 iterated_game
    reward_hacking reward_hacking:world=fragile reward_hacking:world=renewable snake
    connect4""".split()
EPISODES, MIN_FRACTION, MAX_TURNS = 60, 0.25, 8
ACTIONS = "left right up down cooperate defect rescue".split()  # no task asks about these words
TAGS = [f"<{slash}{name}>" for name in ("answer", "think", "move", "action", "choice")
        for slash in ("", "/")]  # fmt: skip
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def main() -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(sys.argv[1])
    print(f"{len(tokenizer)} tokens")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer, which encodes and decodes any text."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *sorted(common_words())]
    ids = {token: i for i, token in enumerate(tokens)}
    # There are no merges: a word that is no token of its own is split into bytes.
    core = Tokenizer(models.BPE(vocab=ids, merges=[], ignore_merges=True))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    special = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    core.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|end|>", pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def common_words() -> set[str]:
    """The words and signs that become tokens; Ġ stands for the space before a word."""
    words = {piece for title in bundled() for text in (title, f" {title}") for piece in split(text)}
    for spec in ENVIRONMENTS:
        seen: Counter[str] = Counter()
        for texts in episodes(spec):
            seen.update({piece for text in texts for piece in split(text)})
        words |= {word for word, count in seen.items() if count >= MIN_FRACTION * EPISODES}
    return {word for word in words if is_useful(word)}


def is_useful(word: str) -> bool:
    """Whether a word may become a token: nothing that a task asks to read letter by letter."""
    letters = word.removeprefix("Ġ")
    is_label = len(letters) == 2 and letters[0].isupper() and letters[1].islower()  # of reverse
    is_board = set(letters) <= set("XO.") and len(letters) > 1  # of connect4: one token per cell
    if word == letters and word.islower() and word not in ACTIONS:
        return False  # in quotes it may be the word of a task
    return len(word) > 1 and not (
        is_label or is_board or re.fullmatch("[a-z]", letters) or re.search("[0-9]", letters)
    )


def split(text: str) -> list[str]:
    """The pieces of a text that may become tokens: words and groups of signs."""
    for tag in TAGS:
        text = text.replace(tag, "\n")
    return [piece for piece, _ in pre_tokenizers.ByteLevel(False).pre_tokenize_str(text)]


def episodes(spec: str) -> Iterator[list[str]]:
    """The texts of some demonstrated episodes; every second one is hasty."""
    env, rng = make(spec), random.Random(0)
    assert isinstance(env, Env)
    for number in range(EPISODES):
        texts = [message["content"] for message in env.reset(rng.choice(DEMO_SEEDS))]
        for _ in range(MAX_TURNS):
            response = env.demonstrate(hasty=number % 2 == 0)
            assert response is not None
            step = env.step(response)
            texts += [response, *([step.message["content"]] if step.message else [])]
            if step.done:
                break
        yield texts


if __name__ == "__main__":
    main()
