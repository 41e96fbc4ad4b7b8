"""Prompts: sentences in an order of their own for every number, so that no two begin alike."""

import random

_SENTENCES = (
    "You are a support agent for a bicycle workshop and answer in one sentence.",
    "Orders leave the warehouse in Lyon within two working days.",
    "Customers reset their password on the account page, under security.",
    "Returns are free for thirty days as long as the label is still on the parcel.",
    "The workshop is open from Tuesday to Saturday, from nine in the morning until six.",
    "Trailers carry at most forty kilograms and must not be towed by a racing bicycle.",
    "Lamps of the second generation are charged over a magnetic plug.",
    "A brake pad that is thinner than one millimetre has to be replaced at once.",
    "Never promise a refund before the finance team has confirmed the payment.",
    "If a customer writes in French, answer in French; otherwise answer in English.",
    "Frames have a warranty of ten years, and electric parts have one of two years.",
    "Spare keys can be ordered with the number that is engraved on the lock.",
    "The newsletter is sent on the first Monday of the month.",
    "Invoices can be downloaded for seven years from the list of orders.",
    "Tyres should be pumped up every two weeks, to the pressure written on their side.",
    "An order can be changed until the parcel has been handed to the carrier.",
    "Gift cards are valid for three years and cannot be exchanged for money.",
    "When a battery gets hot, ask the customer to unplug it and to call the workshop.",
)
_QUESTIONS = (
    "How do I reset my password?",
    "When will my order arrive?",
    "Can I send the trailer back?",
    "Is the workshop open on Monday?",
    "What is the warranty on the frame?",
    "How do I charge the lamp?",
    "Where do I find my invoice?",
    "May I change my order?",
    "How long is a gift card valid?",
    "When do the brake pads need replacing?",
)
_SENTENCES_OF_A_PROMPT = 9


def prompt(number: int, repeats: int = 1) -> str:
    """A system prompt of about 145 tokens, repeated this many times."""
    chosen = random.Random(number).sample(_SENTENCES, _SENTENCES_OF_A_PROMPT)
    return " ".join(chosen * repeats)


def question(number: int) -> str:
    """What is asked after a prompt; the same every ten numbers but for the number."""
    return f" Customer {number}: {_QUESTIONS[number % len(_QUESTIONS)]} Agent:"
