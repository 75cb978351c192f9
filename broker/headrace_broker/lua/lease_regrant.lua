-- Gives a lease a higher grant number, because its stream has an entry of another lease with this number or a higher one:
-- the server of one of the two has lost writes, or a worker of an earlier version has claimed the stream.
-- ARGV: owner, id, at_least
-- id: of the lease. at_least: the stream's last attempt. Returns the number, or 0 if the owner has lost the lease.
if not owned_list(id, owner) then return 0 end
local record = record_of(id)
local number = math.max(record and record.grant or 0, tonumber(at_least)) + 1
if record then -- missing if keys were deleted by hand
  record.grant = number
  keep(id, record)
end
return number
