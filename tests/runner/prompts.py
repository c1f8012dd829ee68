"""Twenty varied prompts: prose, code, Chinese, emoji, one token, long."""

from __future__ import annotations

PROSE = (
    "The lighthouse keeper climbed the stairs every evening at dusk, carrying a small can of oil and a cloth. "
    "He had done so for thirty years, and he knew each step by its sound. On this evening, however,"
)
PYTHON = '''def fibonacci(n: int) -> int:
    """The n-th Fibonacci number."""
    if n < 2:
        return n
    a, b = 0, 1
    for _ in range(n - 1):
'''
SQL = "SELECT customers.name, COUNT(orders.id) AS num_orders\nFROM customers\nLEFT JOIN orders ON"
C = "#include <stdio.h>\n\nint main(int argc, char **argv) {\n    for (int i = 0; i < argc; i++) {\n"
JSON = '{"name": "Ada Lovelace", "born": 1815, "occupation": "mathematician", "languages": ["English", '
HTML = "<!DOCTYPE html>\n<html>\n<head>\n  <title>My first page</title>\n</head>\n<body>\n  <h1>"
CHAT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
CHAT_LIST = "<|im_start|>user\nName three primary colours.<|im_end|>\n<|im_start|>assistant\n"
CHINESE = "北京是中华人民共和国的首都，"
JAPANESE = "昔々あるところに、おじいさんとおばあさんが"
RUSSIAN = "Москва — столица России. В городе"
EMOJI = "🎉🎂🎁 Happy birthday to you! 🎉🎂🎁 Happy birthday to"
MATHS = "The derivative of x^2 is 2x. The derivative of x^3 is 3x^2. The derivative of x^4 is"
RECIPE = "Pancakes\n\nIngredients:\n- 200 g flour\n- 3 eggs\n- 300 ml milk\n\nMethod:\n1."
FACTS = "Water boils at 100 degrees Celsius. Water freezes at"
COUNTING = "one, two, three, four, five, six, seven,"
OPPOSITES = "The opposite of hot is cold. The opposite of up is down. The opposite of big is"
LETTER = "Dear Sir or Madam,\n\nI am writing to apply for the position of"
ONE_TOKEN = "The"

PARAGRAPH = (
    "In the year of the great flood the river rose above the third step of the old town hall, and the people of the "
    "valley carried what they could to the hills. The miller saved his wheel, the baker his oven stones, and the "
    "teacher her books, one basket at a time. When the water fell they came back, swept the mud from their floors, "
    "and began again. "
)

SHORT = {
    "prose": PROSE,
    "python": PYTHON,
    "sql": SQL,
    "c": C,
    "json": JSON,
    "html": HTML,
    "chat": CHAT,
    "chat list": CHAT_LIST,
    "chinese": CHINESE,
    "japanese": JAPANESE,
    "russian": RUSSIAN,
    "emoji": EMOJI,
    "maths": MATHS,
    "recipe": RECIPE,
    "facts": FACTS,
    "counting": COUNTING,
    "opposites": OPPOSITES,
    "letter": LETTER,
    "one token": ONE_TOKEN,
}

LONG_TOKENS = 1500
LONG = PARAGRAPH * 24  # a little more than LONG_TOKENS
