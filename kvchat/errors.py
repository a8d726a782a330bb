"""The errors that kvchat raises on purpose, each with the exit code that the command line ends with.

    KVChatError            1   something failed at run time
    |-- UsageError         2   the request contradicts itself
    |-- InputError         3   a document is unreadable or holds no text
    |-- DoesNotFit         4   more tokens or bytes than the model or the machine has
    |-- ModelNotFound      5   no such model here, and none may be fetched
    |-- QuoteFailed        6   under --strict: the document does not have what the answer says it has
    |-- ModelRefused       1   a model that cannot be served, by name
    `-- Interrupted      130   Ctrl-C

A message is one line: what went wrong, then what to do next.
"""


class KVChatError(Exception):
    exit_code = 1


class UsageError(KVChatError):
    exit_code = 2


class InputError(KVChatError):
    exit_code = 3


class DoesNotFit(KVChatError):
    exit_code = 4


class ModelNotFound(KVChatError):
    exit_code = 5


class QuoteFailed(KVChatError):
    exit_code = 6


class ModelRefused(KVChatError):
    pass


class Interrupted(KVChatError):
    exit_code = 130
