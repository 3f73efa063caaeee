"""Chats for another process, which imports no more than it needs for them."""

import dataclasses
import os
import time

import numpy as np

from models.chat import byte_chat


@dataclasses.dataclass(frozen=True)
class ProcessChat(byte_chat.ByteChat):
  """Shows the number of the process that encodes, in place of messages."""

  def open(self, messages, tools=()):
    del messages, tools
    return np.asarray([int(digit) for digit in str(os.getpid())], np.int32)


@dataclasses.dataclass(frozen=True)
class HangingChat(byte_chat.ByteChat):
  """Never encodes a conversation."""

  def open(self, messages, tools=()):
    time.sleep(3600)
    return super().open(messages, tools)
