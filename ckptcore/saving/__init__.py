"""From live state to storage: who writes which bytes into which file, writing them, committing."""
