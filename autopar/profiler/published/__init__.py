"""Makes blocks of cost profiles out of folders of tables that others have measured and published."""
