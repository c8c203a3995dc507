"""What waits on the host is no memory of the device: the tracker has it in a pool of its own."""

from mindllm.compiled.simulation.memory_tracker import read_tracked

COLUMNS = (
    "start_time_stamp,end_time_stamp,device_addr,stream_id,pool_type,size,actual_used_memory,actual_peak_memory,type,node_name,"
    "user_tasks"
)
DEVICE, HOST = "DefaultEnhancedAscendMemoryPool", "Other"


def test_blocks_of_the_hosts_pool_are_left_out(tmp_path):
    """Rows as MindSpore 2.10 writes them; the host's addresses begin at 8, and its sums at nothing."""
    node = "Default/network-SeededLoss/attention-FlashAttention/FlashAttentionScore-op0"
    rows = [f"1,9,0x1000,0,{DEVICE},512,512,1024,Kernel,{node},{{2}}", f"2,8,0x8,0,{HOST},4096,4096,4096,,,"]
    (tmp_path / "memory_block.csv").write_text("\n".join([COLUMNS, *rows]))
    (tmp_path / "task.csv").write_text(f"time_stamp,node_name\n1,{node}\n")
    (tmp_path / "execute_order").mkdir()
    (tmp_path / "execute_order" / "execute_order.csv").write_text(f"node_name,stream_id\n{node},0\n")
    tracked = read_tracked(tmp_path)
    assert [block.size for block in tracked.blocks] == [512]
    assert (tracked.used_peak, tracked.actual_peak) == (512, 1024)
