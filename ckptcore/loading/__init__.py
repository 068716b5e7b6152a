"""From storage to live state: which bytes, read and verified, into which memory. Only `apply` needs
torch."""
