"""The agent of configs/agent_letters.py: asks for the letter after another.

It knows nothing of the run that starts it. It finds its server in
OPENAI_BASE_URL and its task in TASK_FILE, and its last line is its reward.
"""

import json
import os

import openai

LETTERS = "abcd"


def main() -> None:
  """Asks once, and grades the answer."""
  with open(os.environ["TASK_FILE"]) as file:
    task = json.load(file)
  place = task["seed"] % (len(LETTERS) - 1)
  reply = openai.OpenAI().chat.completions.create(
    model="policy",
    messages=[{"role": "user", "content": LETTERS[place]}],
  )
  is_next = reply.choices[0].message.content == LETTERS[place + 1]
  print(json.dumps({"reward": float(is_next)}))


if __name__ == "__main__":
  main()
