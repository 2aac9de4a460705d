import pytest

from qcollect.errors import DeviceError, UsageError
from qcollect.plan.devices import (
    RankDevice,
    assign_devices,
    device_environment,
    parse_visible_devices,
    warn_of_hidden_devices,
)

UUID = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
OTHER = "GPU-1b2c3d4e-0000-1111-2222-333344445555"
MIG = "MIG-8932f937-d72c-4106-c12f-20bd9faed9f6"
OLD_MIG = f"MIG-{UUID}/1/2"


@pytest.mark.parametrize(
    ("value", "entries"),
    [
        (UUID, (UUID,)),
        ("GPU-8932f937", ("GPU-8932f937",)),
        (MIG, (MIG,)),
        (OLD_MIG, (OLD_MIG,)),
        (f"MIG-{UUID}/1/2,MIG-{UUID}/1/20", (OLD_MIG, f"{OLD_MIG}0")),
        (f"{UUID},{OTHER}", (UUID, OTHER)),
        ("2,3", ("2", "3")),
        ("1,0", ("1", "0")),
        ("7", ("7",)),
        ("", ()),
        (" ", ()),
        ("-1", ()),
        ("-1,0", ()),
        (",0", ()),
        ("0,,1", ("0",)),
        ("1,-1,0", ("1",)),
        ("0,1,", ("0", "1")),
        (" 0 , 1", ("0", "1")),
        ("1gpu,+2", ("1gpu", "+2")),
        ("-0", ("-0",)),
        ("NoDevFiles", ()),
        ("GPU-", ()),
        (UUID.removeprefix("GPU-")[1:], ("932f937-d72c-4106-c12f-20bd9faed9f6",)),
        ("é,0", ()),
        ("²", ()),
        ("9" * 5000, ()),
        # kinds do not mix, and a name has no space before it
        (f"{UUID},1", (UUID,)),
        (f"1,{UUID}", ("1",)),
        (f"{UUID}, {OTHER}", (UUID,)),
        (f" {UUID}", ()),
    ],
)
def test_visible_devices_are_those_cuda_would_take(value, entries):
    visible = parse_visible_devices(value)
    assert visible.entries == entries
    assert visible.repeated is None
    assert device_environment(None, value) == {"CUDA_VISIBLE_DEVICES": value}  # to the workers as it is


@pytest.mark.parametrize(
    ("value", "repeated"),
    [
        ("0,0", "0"),
        ("0, 1,00", "00"),
        (f"{UUID},{UUID}", UUID),
        (f"{UUID},GPU-8932f937", "GPU-8932f937"),
        (f"GPU-8932F937,{UUID}", UUID),
        (f"{OLD_MIG},{OLD_MIG}", OLD_MIG),
    ],
)
def test_a_device_named_twice_is_refused_as_cuda_would_see_none(value, repeated):
    with pytest.raises(DeviceError) as refused:
        device_environment(None, value)
    message = str(refused.value)
    assert message.endswith(f" names a device twice ({repeated}); CUDA then sees none: name each once")
    assert message.startswith("CUDA_VISIBLE_DEVICES=")
    assert device_environment(None, value, "cpu") == {}


def test_repetition_behind_an_entry_that_ends_the_list_does_not_count():
    assert device_environment(None, "0,,0") == {"CUDA_VISIBLE_DEVICES": "0,,0"}


@pytest.mark.parametrize(
    ("gpu_ids", "user_value", "chosen"),
    [
        (("0", "2", "4", "6"), "0,1,2,3,4,5,6,7", "0,2,4,6"),
        (("0", "2"), "4,5,6,7", "4,6"),
        (("2", "0"), "4, 5 ,6", "6,4"),
        (("1",), f"{UUID},{OTHER}", OTHER),
        (("0",), MIG, MIG),
        (("0",), OLD_MIG, OLD_MIG),
        (("0",), "5,,1", "5"),
        ((OTHER,), f"{UUID},{OTHER}", OTHER),
        (("GPU-1b2c3d4e", "GPU-8932f937"), f"{UUID},{OTHER}", f"{OTHER},{UUID}"),
        ((UUID,), "GPU-8932f937,GPU-1b2c", "GPU-8932f937"),
        ((MIG,), MIG, MIG),
    ],
)
def test_ids_choose_among_the_devices_the_user_made_visible(gpu_ids, user_value, chosen):
    # the user's order of devices holds: no CUDA_DEVICE_ORDER
    assert device_environment(gpu_ids, user_value) == {"CUDA_VISIBLE_DEVICES": chosen}


@pytest.mark.parametrize("gpu_ids", [("0", "2", "4", "6"), ("GPU-8932f937", OTHER), (MIG,), (OLD_MIG,)])
def test_ids_are_those_of_nvidia_smi_where_the_user_has_set_nothing(gpu_ids):
    assert device_environment(gpu_ids, None) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(gpu_ids),
    }


def test_nothing_is_set_where_nothing_was_said_and_on_the_cpu():
    assert device_environment(None, None) == {}
    assert device_environment(("0", "x"), "0,,1", "cpu") == {}


@pytest.mark.parametrize(
    ("gpu_ids", "user_value", "message"),
    [
        (
            ("0", "4"),
            "4,5,6,7",
            "--gpu-ids 0,4: 4 is out of range: CUDA_VISIBLE_DEVICES=4,5,6,7 is set and makes 4 device(s) visible, so "
            "ids are positions in it, 0 to 3 (device 4 is at position 0); give such, or unset it to use nvidia-smi's "
            "numbers",
        ),
        (
            ("1",),
            "0,,1",
            "--gpu-ids 1: 1 is out of range: CUDA_VISIBLE_DEVICES=0,,1 is set and makes 1 device(s) visible, so ids "
            "are positions in it, 0 to 0 (its entry '' at position 1 is empty, and CUDA ignores it and every entry "
            "after it); give such, or unset it to use nvidia-smi's numbers",
        ),
        (
            ("0",),
            "-1,0",
            "--gpu-ids 0: CUDA_VISIBLE_DEVICES=-1,0 makes no device visible (its entry '-1' at position 0 is negative, "
            "and CUDA ignores it and every entry after it); unset it, or leave --gpu-ids out to run on the CPU",
        ),
        (
            ("0",),
            "",
            "--gpu-ids 0: CUDA_VISIBLE_DEVICES='' makes no device visible; unset it, or leave --gpu-ids out to run "
            "on the CPU",
        ),
        (
            ("GPU-8932f937",),
            "2,3",
            "--gpu-ids GPU-8932f937: CUDA_VISIBLE_DEVICES=2,3 holds indices, among which GPU-8932f937 cannot be found; "
            "give positions in it (0 to 1)",
        ),
        (
            ("GPU-77",),
            UUID,
            f"--gpu-ids GPU-77: GPU-77 is not among CUDA_VISIBLE_DEVICES={UUID}; name one of its entries, or unset it",
        ),
        (
            ("GPU-8",),
            f"{UUID},GPU-81",
            f"--gpu-ids GPU-8: GPU-8 is the start of 2 entries of CUDA_VISIBLE_DEVICES={UUID},GPU-81; give more of it",
        ),
        (("0",), "1,1", "CUDA_VISIBLE_DEVICES=1,1 names a device twice (1); CUDA then sees none: name each once"),
    ],
)
def test_ids_the_user_has_not_made_visible_are_refused_with_both_named(gpu_ids, user_value, message):
    with pytest.raises(DeviceError) as refused:
        device_environment(gpu_ids, user_value)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("gpu_ids", "user_value", "message"),
    [
        (("0", "00"), None, "--gpu-ids 0,00 names a device twice (00); name each once"),
        ((UUID, "GPU-8932"), None, f"--gpu-ids {UUID},GPU-8932 names a device twice (GPU-8932); name each once"),
        (("0", "00"), "4,5", "--gpu-ids 0,00 names a device twice (00); name each once"),
        (("0", MIG), "0", f"--gpu-ids 0,{MIG} mixes indices and names, and CUDA would see the first kind only; "
         "use one"),
        (("a",), None, "--gpu-ids a: 'a' is no device; give an index (0), a GPU's UUID or its start (GPU-8932f937), or "
         "a MIG instance (MIG-...), as nvidia-smi -L shows them"),
    ],
)  # fmt: skip
def test_ids_that_cannot_be_meant_are_usage_errors(gpu_ids, user_value, message):
    with pytest.raises(UsageError) as refused:
        device_environment(gpu_ids, user_value)
    assert str(refused.value) == message


@pytest.mark.parametrize("gpu_id", ["1gpu", "+1", "²", "", "GPU-", "9" * 5000])
def test_ids_are_plain_numbers_or_names(gpu_id):
    with pytest.raises(UsageError, match="is no device; give an index"):
        device_environment((gpu_id,), None)


@pytest.mark.parametrize(
    ("value", "num_seen", "warning"),
    [
        ("0,,1", 1, "CUDA_VISIBLE_DEVICES=0,,1 makes 1 device(s) visible: its entry '' at position 1 is empty, and "
         "CUDA ignores it and every entry after it"),
        ("-1,0", 0, "CUDA_VISIBLE_DEVICES=-1,0 makes no device(s) visible: its entry '-1' at position 0 is negative, "
         "and CUDA ignores it and every entry after it"),
        ("GPU-1, GPU-2", 1, "CUDA_VISIBLE_DEVICES='GPU-1, GPU-2' makes 1 device(s) visible: its entry ' GPU-2' at "
         "position 1 has a space before its name, and CUDA ignores it"),
        ("0,7,1", 1, "CUDA_VISIBLE_DEVICES=0,7,1 names 3 device(s) and torch sees 1: '7' at position 1 cannot be used, "
         "which hides every one after it; compare with nvidia-smi -L"),
        ("2,3", 0, "CUDA_VISIBLE_DEVICES=2,3 names 2 device(s) and torch sees none, so the run uses the CPU; compare "
         "with nvidia-smi -L, and see with 'qcollect env' whether torch is built for them"),
    ],
)  # fmt: skip
def test_devices_that_are_lost_are_warned_of(value, num_seen, warning):
    assert warn_of_hidden_devices(value, num_seen) == warning


@pytest.mark.parametrize(
    ("value", "num_seen"),
    [(None, 2), ("", 0), ("-1", 0), ("NoDevFiles", 0), ("2,3", 2), ("0,1,", 2), ("0,-1", 1), (MIG, 1)],
)
def test_what_is_hidden_on_purpose_is_not_warned_of(value, num_seen):
    assert warn_of_hidden_devices(value, num_seen) is None


def test_ranks_get_devices_by_position_and_these_the_entries_of_the_variable():
    uuids = (UUID.removeprefix("GPU-"), OTHER.removeprefix("GPU-"))
    devices = assign_devices(2, "cuda", ("H100", "A100"), uuids, visible_value="3, 2", is_pci_order=True)
    assert devices[0] == RankDevice(
        rank=0,
        local_rank=0,
        device="cuda:0",
        device_index=0,
        visible_device="3",
        gpu_name="H100",
        gpu_uuid=UUID,
        gpu_index=3,
    )
    second = devices[1]
    assert (second.rank, second.local_rank, second.device, second.device_index) == (1, 1, "cuda:1", 1)
    assert (second.visible_device, second.gpu_name, second.gpu_uuid, second.gpu_index) == ("2", "A100", OTHER, 2)


def test_what_is_not_known_of_a_device_is_none():
    (device,) = assign_devices(1, "cuda", ("A", "B"))  # fewer processes than devices, no variable, CUDA's own order
    assert device == RankDevice(rank=0, local_rank=0, device="cuda:0", device_index=0, gpu_name="A")
    (device,) = assign_devices(1, "cuda", ("A",), is_pci_order=True)
    assert device.gpu_index == 0
    (device,) = assign_devices(1, "cuda", ("A",), visible_value="GPU-8932f937", is_pci_order=True)
    assert (device.visible_device, device.gpu_index, device.gpu_uuid) == ("GPU-8932f937", None, None)
    (device,) = assign_devices(1, "npu", ("Ascend",), visible_value="3", is_pci_order=True)
    assert (device.device, device.visible_device, device.gpu_index) == ("npu:0", None, None)


@pytest.mark.parametrize(
    ("entry", "uuid", "shown"),
    [
        (UUID.upper(), "", UUID),
        ("GPU-8932f937", UUID.removeprefix("GPU-"), UUID),
        (MIG, OTHER.removeprefix("GPU-"), MIG),
        ("MIG-8932", MIG.removeprefix("MIG-"), MIG),
        (OLD_MIG, "", None),
        ("0", UUID, UUID),
        ("0", "", None),
    ],
)
def test_a_gpu_is_called_as_nvidia_smi_calls_it(entry, uuid, shown):
    (device,) = assign_devices(1, "cuda", ("A",), (uuid,), visible_value=entry)
    assert device.gpu_uuid == shown


def test_ranks_on_the_cpu_have_no_device_number():
    assert assign_devices(3, "cpu", (), visible_value="0,1")[2] == RankDevice(rank=2, local_rank=2, device="cpu")


def test_rank_devices_go_through_a_dict():
    (device,) = assign_devices(1, "cuda", ("A",), (UUID,), visible_value="3", is_pci_order=True)
    assert RankDevice.from_dict(device.to_dict()) == device
    assert all(value is None or type(value) in (int, str) for value in device.to_dict().values())
