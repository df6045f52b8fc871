"""Normalizations, transforms, recurrent cells and parameters in all their uses. What rows may name: `row`."""

from tests.random_programs.kinds.row import row

ROWS = (
    row("local response", "h = h + F.local_response_norm(h.transpose(1, 2), 3).transpose(1, 2)"),
    row(
        "group norm odd",
        "h = h + self.n(h.transpose(1, 2)).transpose(1, 2)",
        init="self.n = nn.GroupNorm(2, D)",
        divisor=2,
    ),
    row(
        "instance norm",
        "h = h + self.n(h.transpose(1, 2)).transpose(1, 2)",
        init="self.n = nn.InstanceNorm1d(D, affine=True)",
    ),
    row(
        "instance norm track",
        "h = h + self.n(h.transpose(1, 2)).transpose(1, 2)",
        init="self.n = nn.InstanceNorm1d(D, affine=True, track_running_stats=True)",
    ),
    row("instance norm 1 d3", "h = h + self.n(h[:, None])[:, 0]", init="self.n = nn.InstanceNorm2d(1)"),
    row("rms norm", "h = self.n(h) + F.rms_norm(h, h.shape[1:])", init="self.n = nn.RMSNorm(D)"),
    row("layer norm 2dims", "h = self.n(h) + F.layer_norm(h, (D,))", init="self.n = nn.LayerNorm((T, D))"),
    row("batch norm 2d", "h = h + self.n(h[:, None])[:, 0]", init="self.n = nn.BatchNorm2d(1)"),
    row(
        "batch norm no stats",
        "h = h + self.n(h.transpose(1, 2)).transpose(1, 2)",
        init="self.n = nn.BatchNorm1d(D, track_running_stats=False, affine=False)",
    ),
    row(
        "batch norm 3d",
        "h = h + self.n(h.view(h.size(0), 2, h.size(1), 2, -1)).view(h.shape)",
        init="self.n = nn.BatchNorm3d(2)",
        divisor=2,
    ),
    row("sync bn", "h = h + self.n(h.transpose(1, 2)).transpose(1, 2)", init="self.n = nn.SyncBatchNorm(D)"),
    row("fft", "h = h + torch.fft.ifft(torch.fft.fft(h, dim=2) * torch.arange(D), dim=2).real * 0.1"),
    row(
        "rfft2",
        """
        g = torch.fft.rfft2(h)
        h = h + torch.fft.irfft2(g * self.w, s=h.shape[1:])
        """,
        init="self.w = nn.Parameter(torch.randn(D // 2 + 1))",
    ),
    row("fftn batch", "h = h + torch.fft.fftn(h).real * 0.05"),
    row("fft shift", "h = h + torch.fft.fftshift(h, 2) + torch.fft.ifftshift(h)"),
    row(
        "polar",
        """
        g = torch.polar(h.abs(), h)
        h = g.real + g.imag + g.angle() + g.conj().imag
        """,
    ),
    row(
        "complex matmul",
        """
        g = torch.complex(h, h.roll(1, 2))
        g = g @ torch.complex(self.w, -self.w)
        h = h + g.abs() * 0.1 + g.real * 0.1
        """,
        init="self.w = nn.Parameter(torch.randn(D, D) * 0.4)",
    ),
    row(
        "stft",
        """
        h = (
            h
            + torch.stft(
                h[..., :D].reshape(-1, D),
                4,
                2,
                window=torch.hann_window(4, dtype=h.dtype),
                return_complex=True,
            )
            .abs()
            .mean()
            * 0.1
        )
        """,
    ),
    row("lstm", "h = h + self.r(h)[0]", init="self.r = nn.LSTM(D, D, 2, batch_first=True)"),
    row(
        "lstm bi",
        """
        o, (a, b) = self.r(h.transpose(0, 1))
        h = h + o.transpose(0, 1) + a.sum(0)[:, None].repeat(1, 1, 2)
        """,
        init="self.r = nn.LSTM(D, D // 2, 1, bidirectional=True)",
        divisor=2,
    ),
    row(
        "lstm proj",
        "h = h + self.r(h)[0].repeat(1, 1, 2)",
        init="self.r = nn.LSTM(D, D, 1, batch_first=True, proj_size=D // 2)",
        divisor=2,
    ),
    row(
        "gru",
        "h = h + self.r(h, self.s.expand(-1, h.size(0), -1).contiguous())[0]",
        init="""
        self.r = nn.GRU(D, D, 1, batch_first=True)
        self.s = nn.Parameter(torch.randn(1, 1, D))
        """,
    ),
    row("rnn relu", "h = h + self.r(h)[0]", init='self.r = nn.RNN(D, D, 1, nonlinearity="relu", batch_first=True)'),
    row(
        "lstmcell",
        """
        a = b = h[:, 0]
        for i in range(3):
            a, b = self.r(h[:, i], (a, b))
        h = h + a[:, None]
        """,
        init="self.r = nn.LSTMCell(D, D)",
    ),
    row(
        "grucell",
        """
        a = h[:, 0]
        for i in range(3):
            a = self.r(h[:, i], a)
        h = h + a[:, None]
        """,
        init="self.r = nn.GRUCell(D, D)",
    ),
    row(
        "shared view",
        "h = h @ self.w.t() + h @ self.w[:, :].clone() + h * self.w[0] + h * self.w.view(-1)[:D]",
        init="self.w = nn.Parameter(torch.randn(D, D) * 0.3)",
    ),
    row(
        "param slices",
        """
        a, b = self.w.split([D - 2, 2], 0)
        h = h + F.pad(h @ a.t(), (0, 2)) + F.pad(h @ b.t(), (0, D - 2))
        """,
        init="self.w = nn.Parameter(torch.randn(D, D) * 0.3)",
    ),
    row(
        "weight norm new",
        "h = h + self.l(h)",
        init="self.l = nn.utils.parametrizations.weight_norm(nn.Linear(D, D), dim=1)",
    ),
    row(
        "weight norm none",
        "h = h + self.l(h)",
        init="self.l = nn.utils.parametrizations.weight_norm(nn.Linear(D, D), dim=None)",
    ),
    row(
        "weight norm conv",
        "h = h + self.l(h.transpose(1, 2)).transpose(1, 2)",
        init="self.l = nn.utils.parametrizations.weight_norm(nn.Conv1d(D, D, 3, padding=1))",
    ),
    row(
        "spectral conv",
        "h = h + self.l(h.transpose(1, 2)).transpose(1, 2)",
        init="self.l = nn.utils.parametrizations.spectral_norm(nn.Conv1d(D, D, 3, padding=1))",
    ),
    row(
        "orthogonal",
        "h = h + self.l(h)",
        init="self.l = nn.utils.parametrizations.orthogonal(nn.Linear(D, D, bias=False))",
    ),
    row(
        "orthogonal cayley",
        "h = h + self.l(h)",
        init="""
        self.l = nn.utils.parametrizations.orthogonal(
            nn.Linear(D, D, bias=False), orthogonal_map="cayley"
        )
        """,
    ),
    row(
        "zero dim param",
        "h = h * self.s + self.t",
        init="""
        self.s = nn.Parameter(torch.tensor(1.5))
        self.t = nn.Parameter(torch.tensor(0.1))
        """,
    ),
    row(
        "one elem params",
        "h = h * self.s + self.t.view(1, 1, 1)",
        init="""
        self.s = nn.Parameter(torch.ones(1))
        self.t = nn.Parameter(torch.zeros(1, 1))
        """,
    ),
    row("param used by index of input", "h = h + self.w[y][:, None]", init="self.w = nn.Parameter(torch.randn(C, D))"),
    row(
        "param table gather",
        "h = h + torch.gather(self.w, 0, y[:, None].expand(-1, D))[:, None]",
        init="self.w = nn.Parameter(torch.randn(C, D))",
    ),
    row(
        "embedding max etc",
        'h = h + F.embedding_bag(y[:, None].expand(-1, 3), self.w, mode="max")[:, None]',
        init="self.w = nn.Parameter(torch.randn(C, D))",
    ),
    row(
        "embedding bag weights",
        """
        h = (
            h
            + F.embedding_bag(y[:, None].expand(-1, 3), self.w, mode="sum", per_sample_weights=h[:, 0, :3])[
                :, None
            ]
        )
        """,
        init="self.w = nn.Parameter(torch.randn(C, D))",
    ),
    row(
        "prelu",
        "h = F.prelu(h.transpose(1, 2), self.a).transpose(1, 2) + F.prelu(h, self.b)",
        init="""
        self.a = nn.Parameter(torch.rand(D))
        self.b = nn.Parameter(torch.rand(1))
        """,
    ),
    row(
        "parameterlist tie t",
        """
        h = h @ self.a
        z0 = h @ self.b.t()
        h = h + z0
        """,
        init="""
        self.a = nn.Parameter(torch.randn(D, D) * 0.3)
        self.b = self.a
        """,
    ),
    row("frozen middle", "h = h + self.l(h)", init="self.l = nn.Linear(D, D).requires_grad_(False)"),
    row("partial use grad none", "h = h + self.l(h.detach()).detach()", init="self.l = nn.Linear(D, D)"),
)
