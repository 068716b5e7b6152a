import pytest

pytest.register_assert_rewrite("ckptcore.testing.contract")
