"""The forms in which a model is asked questions: in fine-tuning on SQuAD and in the needle test alike."""

from __future__ import annotations


def question_prompt(context: str, question: str) -> str:
    """What an answer, with a space before it, is the continuation of."""
    return f"{context}\n\nQuestion: {question}\nAnswer:"
