"""Convolutions, pooling, padding, resampling and what shifts elements. What rows may name: `row`."""

from tests.random_programs.kinds.row import row

ROWS = (
    row("roll 2", "h = h + h.roll((1, -2), (1, 2)) + h.roll(3)"),
    row("flip", "h = h + h.flip(1, 2) + h.fliplr()"),
    row(
        "conv1d groups dil",
        "h = h + self.c(h.transpose(1, 2)).transpose(1, 2)",
        init="self.c = nn.Conv1d(D, D, 3, padding=2, dilation=2, groups=2)",
        divisor=2,
    ),
    row(
        "convT1d",
        "h = h + self.c(h.transpose(1, 2))[..., : h.size(1)].transpose(1, 2)",
        init="self.c = nn.ConvTranspose1d(D, D, 3, stride=2, padding=1, output_padding=1, groups=2)",
        divisor=2,
    ),
    row(
        "conv2d circ",
        "h = h + self.c(h[:, None]).mean(1)",
        init='self.c = nn.Conv2d(1, 3, 3, padding=1, padding_mode="circular")',
    ),
    row(
        "conv2d reflect",
        "h = h + self.c(h[:, None]).mean(1)",
        init='self.c = nn.Conv2d(1, 3, 3, padding=1, padding_mode="reflect")',
    ),
    row(
        "conv2d depth",
        """
        g = h[:, None].expand(-1, 4, -1, -1)
        h = h + self.c(g).mean(1)
        """,
        init="self.c = nn.Conv2d(4, 8, (1, 3), padding=(0, 1), groups=4)",
    ),
    row(
        "conv2d stride same",
        """
        g = self.c(h[:, None])
        h = h + g.mean((1, 3))[..., None].repeat_interleave(2, 1)[:, : h.size(1)]
        """,
        init="self.c = nn.Conv2d(1, 3, 3, padding=1, stride=2)",
    ),
    row(
        "conv same even", "h = h + self.c(h[:, None]).mean(1)", init='self.c = nn.Conv2d(1, 3, (2, 4), padding="same")'
    ),
    row(
        "convT2d dil",
        "h = h + self.c(h[:, None]).mean(1)",
        init="self.c = nn.ConvTranspose2d(1, 4, 3, padding=2, dilation=2)",
    ),
    row(
        "conv3d",
        """
        g = h.view(h.size(0), 1, h.size(1), 2, -1)
        h = h + self.c(g).mean(1).flatten(2)
        """,
        init="self.c = nn.Conv3d(1, 2, (3, 1, 3), padding=(1, 0, 1))",
        divisor=2,
    ),
    row(
        "convT3d",
        """
        g = h.view(h.size(0), 1, h.size(1), 2, -1)
        h = h + self.c(g).mean(1).flatten(2)
        """,
        init="self.c = nn.ConvTranspose3d(1, 2, (3, 1, 3), padding=(1, 0, 1))",
        divisor=2,
    ),
    row(
        "unfold fold",
        """
        g = F.unfold(h[:, None], 2, padding=1)
        g = F.fold(g * 2, (h.size(1), h.size(2)), 2, padding=1)
        h = h + g[:, 0]
        """,
    ),
    row(
        "pixel shuffle",
        """
        g = h.view(h.size(0), h.size(1), 4, -1)[:, :, :, :]
        g = F.pixel_shuffle(g.transpose(1, 2), 2)
        h = h + g.mean((1, 2, 3))[:, None, None]
        """,
    ),
    row(
        "pixel unshuffle",
        """
        g = F.pixel_unshuffle(h[:, None], 2)
        h = h + g.mean((2, 3)).sum(1)[:, None, None]
        """,
    ),
    row(
        "channel shuffle",
        """
        g = (
            F.channel_shuffle(h.transpose(1, 2), 2)
            if False
            else nn.ChannelShuffle(2)(h.transpose(1, 2)[..., None])[..., 0]
        )
        h = h + g.transpose(1, 2)
        """,
        divisor=2,
    ),
    row(
        "grid_sample",
        """
        n = F.affine_grid(
            self.w.expand(h.size(0), 2, 3), (h.size(0), 1, h.size(1), h.size(2)), align_corners=False
        )
        h = h + F.grid_sample(h[:, None], n, align_corners=False)[:, 0]
        """,
        init="self.w = nn.Parameter(torch.tensor([[0.9, 0.1, 0.05], [-0.1, 0.8, 0.1]]).double())",
    ),
    row(
        "interpolate bilinear",
        """
        g = F.interpolate(h[:, None], scale_factor=2, mode="bilinear", align_corners=True)
        h = h + F.avg_pool2d(g, 2)[:, 0]
        """,
    ),
    row(
        "interpolate nearest",
        """
        g = F.interpolate(h.transpose(1, 2), size=9, mode="nearest")
        h = h + g.mean(2)[:, None]
        """,
    ),
    row(
        "interpolate bicubic",
        """
        g = F.interpolate(h[:, None], size=(5, 7), mode="bicubic")
        h = h + g.mean((1, 2, 3))[:, None, None]
        """,
    ),
    row(
        "interpolate area aa",
        """
        g = F.interpolate(h[:, None], size=(4, 5), mode="bilinear", antialias=True) + F.interpolate(
            h[:, None], size=(4, 5), mode="area"
        )
        h = h + g.mean((1, 2, 3))[:, None, None]
        """,
    ),
    row(
        "interpolate linear",
        """
        g = F.interpolate(h.transpose(1, 2), scale_factor=1.5, mode="linear")
        h = h + g.mean(2)[:, None]
        """,
    ),
    row(
        "maxpool idx",
        """
        g, i = F.max_pool1d(h, 2, return_indices=True)
        h = h + F.max_unpool1d(g, i, 2)
        """,
        divisor=2,
    ),
    row("maxpool dil", "h = h + F.max_pool2d(h[:, None], 3, 1, 1, 1)[:, 0]"),
    row("lp_pool", "h = h + F.pad(F.lp_pool1d(h.abs() + 0.1, 2, 2), (0, D // 2))", divisor=2),
    row(
        "adaptive max",
        """
        h = (
            h
            + F.adaptive_max_pool1d(h, 3).sum(2, keepdim=True)
            + F.adaptive_avg_pool1d(h.transpose(1, 2), 4).mean(2)[:, None]
        )
        """,
    ),
    row(
        "avgpool nopad",
        """
        h = (
            h
            + F.avg_pool2d(h[:, None], 3, 1, 1, count_include_pad=False, divisor_override=5)[:, 0]
            + F.avg_pool1d(h, 3, 1, 1, count_include_pad=False)
        )
        """,
    ),
    row(
        "avgpool ceil",
        """
        h = (
            h
            + F.avg_pool1d(h, 3, 2, ceil_mode=True).mean(2, keepdim=True)
            + F.max_pool1d(h, 3, 2, ceil_mode=True).mean(2, keepdim=True)
        )
        """,
    ),
    row("fractional", "h = h + 0 * F.fractional_max_pool2d(h[:, None], 2, output_size=(3, 3)).mean()"),
    row(
        "pad modes",
        """
        g = F.pad(h, (2, 1), "reflect")
        g2 = F.pad(h.transpose(1, 2), (1, 2), "circular")
        g3 = F.pad(h, (1, 2), "replicate")
        h = (
            h
            + g[..., 2:-1] * 0.1
            + g.mean((1, 2))[:, None, None]
            + g2.transpose(1, 2)[:, : h.size(1)]
            + g3[..., 2:-1]
        )
        """,
    ),
    row("pad negative", "h = h + F.pad(F.pad(h, (-1, -2)), (2, 1), value=0.3) + F.pad(h, (1, -1, -1, 1))"),
    row("constant_pad batch", "h = h + F.pad(h, (0, 0, 0, 0, 1, -1))"),
)
